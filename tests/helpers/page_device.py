"""A device with the pages of a KV cache: what would be read from them."""

import dataclasses

import numpy as np

from rl.engine.builtin import block_manager
from tests.helpers import page_holders


def ids(text):
  """Returns an id for each letter."""
  return np.array([ord(letter) for letter in text], np.int32)


@dataclasses.dataclass(eq=False)
class Request:
  """A conversation, as far as it is known, and its pages.

  Attributes:
    since: lowest version that it may find in the cache.
  """

  text: str
  table: block_manager.PageTable
  since: int


class Device:
  """Pages that hold, for every position, all ids up to it; and its version.

  Copies wait for the next dispatch, as the engine's do.

  Attributes:
    cached: positions that requests found in the cache, in all.
  """

  def __init__(self, num_pages, page_size, min_copied_ids=1):
    self.blocks = block_manager.BlockManager(
      num_pages, page_size, min_copied_ids
    )
    self.page_size = page_size
    self.cells = {}
    self.copies = []
    self.requests = []
    self.version = 0
    self.since = 0
    self.cached = 0

  def begin(self, text):
    table, copy = self.blocks.begin(ids(text))
    assert table.cached < len(text)
    if copy is not None:
      assert copy[0] != copy[1]
      self.copies.append(copy)
    self.requests.append(Request(text, table, self.since))
    self.cached += table.cached

  def look(self, text):
    """Begins a request and undoes that, without the copy."""
    self.blocks.cancel(self.blocks.begin(ids(text))[0])

  def feed(self, one, length):
    """Feeds up to so many ids; a request without pages for them ends."""
    table = one.table
    before = list(table.pages)
    if not self.blocks.grow(table, length):
      assert table.pages == before
      return self.end(one)
    self.dispatch()
    for at in range(table.cached, length):
      page, offset = divmod(at, self.page_size)
      cell = (one.text[: at + 1], self.version)
      self.cells[table.pages[page], offset] = cell
    if length > table.cached:
      table.cached = length
      if table.oldest_kv is None:
        table.oldest_kv = self.version

  def dispatch(self):
    self.cells, self.copies = self.after_copies(), []

  def after_copies(self):
    cells = dict(self.cells)
    for source, target in block_manager.simultaneous_copies(self.copies):
      for at in range(self.page_size):
        cells[target, at] = self.cells.get((source, at))
    return cells

  def share(self, one):
    self.blocks.share(one.table, ids(one.text))

  def end(self, one):
    self.requests.remove(one)
    self.blocks.end(one.table, ids(one.text))

  def new_weights(self, way):
    """Switches to the next version: "restart", "detach", "flush" or "keep"."""
    self.version += 1
    if way in ("restart", "detach"):
      self.since = self.version
    if way == "restart":
      self.blocks.restart(one.table for one in self.requests)
      assert self.blocks.num_free == self.blocks.num_pages
    elif way == "detach":
      self.blocks.detach()
      assert self.blocks.num_idle == 0
    elif way == "flush":
      self.blocks.flush()
      assert self.blocks.num_idle == 0

  def check(self):
    """Every table finds its own ids, and no version below what it says."""
    page_holders.check_blocks(self.blocks, [one.table for one in self.requests])
    cells = self.after_copies()
    for one in self.requests:
      table = one.table
      assert (table.oldest_kv is None) == (table.cached == 0)
      for at in range(table.cached):
        page, offset = divmod(at, self.page_size)
        text, version = cells[table.pages[page], offset]
        assert text == one.text[: at + 1]
        assert version >= max(table.oldest_kv, one.since)

  def end_all(self):
    """Ends all requests; every page is then free or can be."""
    while self.requests:
      self.end(self.requests[0])
    page_holders.check_blocks(self.blocks, [])
    self.blocks.flush()
    assert self.blocks.num_free == self.blocks.num_pages
