"""Pages as the device has them: what a lease reads is what was fed for it."""

import dataclasses

import numpy as np
import pytest

from rl.engine.builtin import block_manager


def _ids(text):
  return np.array([ord(letter) for letter in text], np.int32)


@dataclasses.dataclass
class _Request:
  text: str
  lease: block_manager.Lease


class _Device:
  """Pages that hold, for every position, all ids up to it; and its version.

  Copies wait for the next dispatch, as the engine's do.
  """

  def __init__(self, num_pages, page_size, draws):
    self.paging = block_manager.Paging(num_pages, page_size)
    self.page_size = page_size
    self.cells = {}
    self.copies = []
    self.requests = []
    self.draws = draws
    self.version = 0
    self.cached = 0

  def begin(self):
    text = self._text(self.draws.integers(1, 20))
    if self.requests and self.draws.random() < 0.3:
      text = self._any().text
    lease, copy = self.paging.begin(_ids(text))
    assert lease.cached < len(text)
    if copy is not None:
      assert copy[0] != copy[1]
      self.copies.append(copy)
    self.requests.append(_Request(text, lease))
    self.cached += lease.cached

  def feed(self):
    one = self._any()
    lease = one.lease
    length = int(self.draws.integers(lease.cached, len(one.text) + 1))
    before = list(lease.pages)
    if not self.paging.grow(lease, length):
      assert lease.pages == before
      return self.end(one)
    self.dispatch()
    for at in range(lease.cached, length):
      page, offset = divmod(at, self.page_size)
      cell = (one.text[: at + 1], self.version)
      self.cells[lease.pages[page], offset] = cell
    if length > lease.cached:
      lease.cached = length
      if lease.oldest_kv is None:
        lease.oldest_kv = self.version
    if length == len(one.text):
      one.text += self._text(self.draws.integers(1, 4))

  def dispatch(self):
    self.cells, self.copies = self.after_copies(), []

  def after_copies(self):
    cells = dict(self.cells)
    for source, target in block_manager.at_once(self.copies):
      for at in range(self.page_size):
        cells[target, at] = self.cells.get((source, at))
    return cells

  def share(self):
    one = self._any()
    self.paging.share(one.lease, _ids(one.text))

  def end(self, one=None):
    one = one or self._any()
    self.requests.remove(one)
    self.paging.end(one.lease, _ids(one.text))

  def new_weights(self):
    self.version += 1
    way = self.draws.integers(3)
    if way == 0:
      self.paging.restart(one.lease for one in self.requests)
      assert self.paging.num_free == self.paging.num_pages
    elif way == 1:
      self.paging.forget()
      assert self.paging.num_idle == 0

  def check(self):
    """Every lease finds its own ids, and no version below what it says."""
    self.paging.check([one.lease for one in self.requests])
    cells = self.after_copies()
    for one in self.requests:
      lease = one.lease
      assert (lease.oldest_kv is None) == (lease.cached == 0)
      for at in range(lease.cached):
        page, offset = divmod(at, self.page_size)
        text, version = cells[lease.pages[page], offset]
        assert text == one.text[: at + 1]
        assert version >= lease.oldest_kv

  def _text(self, length):
    return "".join("ab"[i] for i in self.draws.integers(2, size=length))

  def _any(self):
    return self.requests[self.draws.integers(len(self.requests))]


@pytest.mark.parametrize(
  ("num_pages", "page_size", "most"),
  [(12, 4, 5), (40, 4, 8), (9, 1, 3), (6, 8, 4), (200, 3, 8)],
)
def test_every_lease_finds_its_own_ids_whatever_happens(
  num_pages, page_size, most
):
  draws = np.random.default_rng(num_pages)
  device = _Device(num_pages, page_size, draws)
  begun = 0
  while begun < 2000:
    action = draws.random()
    if not device.requests or (action < 0.3 and len(device.requests) < most):
      device.begin()
      begun += 1
    elif action < 0.7:
      device.feed()
    elif action < 0.8:
      device.share()
    elif action < 0.99:
      device.end()
    else:
      device.new_weights()
    device.check()
  assert device.cached > 2000
  while device.requests:
    device.end()
  device.paging.check([])
  device.paging.forget()
  assert device.paging.num_free == num_pages
