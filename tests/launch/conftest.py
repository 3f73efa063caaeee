"""One finished run for all files, and a real browser for pages."""

import dataclasses
import fcntl
import html.parser
import json
import os
import pathlib
import shutil
import subprocess

import pytest

from tests.helpers import commands


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


@pytest.fixture
def browse(tmp_path):
  """Opens a page in a browser, runs a script at its end, returns the result."""
  names = ("chromium", "chromium-browser", "google-chrome")
  browser = next(filter(None, map(shutil.which, names)), None)
  if browser is None:
    pytest.skip(f"no browser on PATH: {', '.join(names)}")

  def run(page, script=""):
    opened = page.with_name("opened.html")
    opened.write_text(page.read_text() + f"<script>{script}</script>")
    flags = (
      "headless no-sandbox disable-gpu disable-quic no-first-run "
      "disable-background-networking disable-component-update disable-sync "
      f"user-data-dir={tmp_path}/browser virtual-time-budget=2000 "
      "window-size=1280,2000 dump-dom"
    )
    command = [browser, *(f"--{flag}" for flag in flags.split())]
    done = subprocess.run(
      [*command, f"file://{opened}"],
      capture_output=True,
      text=True,
      timeout=60,
      check=True,
    )
    result = _Page(done.stdout)
    assert "data-error" not in result.body, result.body["data-error"]
    assert result.body["data-ready"] == "true"
    return result

  return run
