"""A real browser for pages: what it leaves of them, and their errors."""

import html.parser
import shutil
import subprocess

import pytest


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
