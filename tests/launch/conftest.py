"""One finished run for all files, and a real browser for pages."""

import dataclasses
import fcntl
import html.parser
import json
import os
import pathlib
import subprocess

import pytest

from tests.helpers import browser as browser_lib
from tests.helpers import commands
from tests.helpers import terminal as terminal_lib


@dataclasses.dataclass(frozen=True)
class FinishedRun:
  """The directory of a finished run, which tests must not change."""

  path: pathlib.Path
  result: commands.Result

  def copy(self, directory: pathlib.Path) -> pathlib.Path:
    """Returns a copy that a test may change."""
    target = directory / "copy"
    # Times too: those of report and checkpoint are compared.
    subprocess.run(["cp", "-a", str(self.path), str(target)], check=True)
    return target


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
  """A run of `commands.TINY`, made once for all workers of pytest-xdist."""
  shared = tmp_path_factory.getbasetemp()
  if "PYTEST_XDIST_WORKER" in os.environ:
    shared = shared.parent
  path, result = shared / "finished" / "run", shared / "finished.json"
  with (shared / "finished.lock").open("a") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    if not result.exists():
      done = commands.launch(*commands.train(path))
      result.write_text(json.dumps(dataclasses.asdict(done)))
  told = commands.Result(**json.loads(result.read_text()))
  assert told.returncode == 0, told.stderr
  return FinishedRun(path, told)


class _Page(html.parser.HTMLParser):
  """Elements and text of a page as a browser left it, without scripts."""

  def __init__(self, text):
    super().__init__()
    self.elements, self.text = [], []
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.elements.append((tag, dict(attrs)))

  def handle_data(self, data):
    if self.elements[-1:] and self.elements[-1][0] not in ("script", "style"):
      self.text.append(data)

  def having(self, attribute, *words):
    """Attributes of the elements whose `attribute` holds all the words."""
    return [
      attrs
      for _, attrs in self.elements
      if attribute in attrs and {*words} <= {*attrs[attribute].split()}
    ]

  @property
  def body(self):
    return next(attrs for tag, attrs in self.elements if tag == "body")


@pytest.fixture(scope="session")
def one_browser(tmp_path_factory):
  with browser_lib.opened(tmp_path_factory.mktemp("browser")) as opened:
    yield opened


@pytest.fixture
def browser(one_browser):
  """A real browser whose window is that of a desk; scripts may not fail."""
  one_browser.errors.clear()
  one_browser.look()
  yield one_browser
  one_browser.leave()
  assert not one_browser.errors


@pytest.fixture
def browse(browser):
  """Opens a page in a browser, runs a script at its end, returns the result."""

  def run(page, script=""):
    browser.open(f"file://{page}")
    browser.do(f"(() => {{ {script} }})()")
    browser.look()
    return _Page(browser.do("document.documentElement.outerHTML"))

  return run


@pytest.fixture
def terminal(monkeypatch):
  """A terminal of 80 columns without colours."""
  monkeypatch.setenv("TERM", "xterm-256color")
  monkeypatch.setenv("COLUMNS", "80")
  monkeypatch.setenv("NO_COLOR", "1")
  return terminal_lib.Terminal()
