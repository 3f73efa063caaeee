"""A real browser without a window, driven over its debugging protocol."""

import contextlib
import itertools
import json
import pathlib
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.sync import client

from tests.helpers import machine_speed

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
  "headless no-sandbox disable-gpu disable-quic no-first-run hide-scrollbars "
  "disable-background-networking disable-component-update disable-sync "
  "disable-dev-shm-usage remote-debugging-port=0 "
  # A page in the background would get no timers.
  "disable-renderer-backgrounding disable-background-timer-throttling"
)
_START_S = machine_speed.scaled(60.0)
_WAIT_S = machine_speed.scaled(60.0)
_KEYS = {
  "Tab": 9,
  "Enter": 13,
  "Escape": 27,
  " ": 32,
  "PageUp": 33,
  "PageDown": 34,
  "End": 35,
  "Home": 36,
  "ArrowLeft": 37,
  "ArrowUp": 38,
  "ArrowRight": 39,
  "ArrowDown": 40,
}


class Browser:
  """One page of a browser; `opened` makes it."""

  def __init__(self, socket: client.ClientConnection):
    self._socket = socket
    self._numbers = itertools.count(1)
    self.errors: list[str] = []
    """Errors of scripts, and what the policy of a page has refused."""
    for domain in ("Page", "Runtime", "Log"):
      self.ask(f"{domain}.enable")

  def ask(self, method: str, **fields: Any) -> dict[str, Any]:
    """Returns the answer to a command of the protocol."""
    number = next(self._numbers)
    self._socket.send(
      json.dumps({"id": number, "method": method, "params": fields})
    )
    while True:
      message = json.loads(self._socket.recv(_WAIT_S))
      if message.get("id") == number:
        assert "error" not in message, message["error"]
        return message["result"]
      self._note(message)

  def _note(self, message: dict[str, Any]) -> None:
    told = message.get("params", {})
    if message.get("method") == "Runtime.exceptionThrown":
      self.errors.append(json.dumps(told["exceptionDetails"])[:600])
    elif message.get("method") == "Log.entryAdded":
      entry = told["entry"]
      self.errors += [entry["text"]] * (entry["level"] == "error")

  def open(self, url: str) -> None:
    """Opens a page and waits until it has drawn itself."""
    self.leave()
    self.ask("Page.navigate", url=url)
    self.wait("document.body?.dataset.ready === 'true'")

  def leave(self) -> None:
    """Leaves the page, which then asks for nothing more."""
    self.ask("Page.navigate", url="about:blank")
    self.wait("location.href === 'about:blank'")

  def do(self, script: str) -> Any:
    """Returns the value of an expression, of a promise once it is kept."""
    answer = self.ask(
      "Runtime.evaluate",
      expression=script,
      awaitPromise=True,
      returnByValue=True,
      userGesture=True,
    )
    assert "exceptionDetails" not in answer, answer["exceptionDetails"]
    return answer["result"].get("value")

  def wait(self, condition: str) -> Any:
    """Returns the value of an expression once it is true."""
    end_s = time.monotonic() + _WAIT_S
    while True:
      # Between two pages there is nothing to ask.
      with contextlib.suppress(AssertionError):
        if value := self.do(condition):
          return value
      assert time.monotonic() < end_s, (condition, self.errors, self.text())
      time.sleep(0.02)

  def text(self, selector: str = "body") -> str:
    """Returns the text that can be seen in an element."""
    return self.do(f"document.querySelector({json.dumps(selector)})?.innerText")

  def count(self, selector: str) -> int:
    """Returns the number of elements."""
    return self.do(f"document.querySelectorAll({json.dumps(selector)}).length")

  def values(self, selector: str, attribute: str) -> list[str | None]:
    """Returns an attribute of all elements."""
    names = json.dumps([selector, attribute])
    return self.do(
      f"(([s, a]) => [...document.querySelectorAll(s)].map("
      f"(e) => e.getAttribute(a)))({names})"
    )

  def click(self, selector: str, place: int = 0) -> None:
    """Clicks an element."""
    self.do(
      f"document.querySelectorAll({json.dumps(selector)})[{place}].click()"
    )

  def choose(self, selector: str, value: str) -> None:
    """Chooses an option, or types a text into an empty field."""
    names = json.dumps([selector, value])
    self.do(
      "(([s, v]) => { const e = document.querySelector(s); e.value = v;"
      " e.dispatchEvent(new Event('input')); e.dispatchEvent("
      f"new Event('change')); }})({names})"
    )

  def press(self, *keys: str) -> None:
    """Presses keys, one after the other."""
    for key in keys:
      code = _KEYS.get(key) or ord(key.upper())
      # An Enter without text activates nothing.
      text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
      for kind in ("keyDown" if text else "rawKeyDown", "keyUp"):
        self.ask(
          "Input.dispatchKeyEvent",
          type=kind,
          key=key,
          windowsVirtualKeyCode=code,
          **({"text": text} if kind == "keyDown" else {}),
        )

  def look(
    self, *, width: int = 1280, height: int = 900, dark: bool = False
  ) -> None:
    """Gives the page another window, or other colours."""
    self.ask(
      "Emulation.setDeviceMetricsOverride",
      width=width,
      height=height,
      deviceScaleFactor=1,
      mobile=False,
    )
    scheme = "dark" if dark else "light"
    self.ask(
      "Emulation.setEmulatedMedia",
      features=[{"name": "prefers-color-scheme", "value": scheme}],
    )
    # The page draws itself once more in the next frame.
    self.do(
      "new Promise((done) => requestAnimationFrame(() =>"
      " requestAnimationFrame(done)))"
    )

  def pixel(self, x: int, y: int) -> tuple[int, int, int]:
    """Returns red, green and blue of a place, 0 to 255 each."""
    data = self.ask("Page.captureScreenshot")["data"]
    red, green, blue, _ = self.do(
      "(async () => { const image = new Image(); image.src ="
      f" 'data:image/png;base64,{data}'; await image.decode();"
      " const pen = new OffscreenCanvas(1, 1).getContext('2d');"
      f" pen.drawImage(image, {-x}, {-y});"
      " return [...pen.getImageData(0, 0, 1, 1).data]; })()"
    )
    return red, green, blue


@contextlib.contextmanager
def opened(directory: pathlib.Path) -> Iterator[Browser]:
  """Starts a browser for the body of a `with`; skips the test without one.

  Args:
    directory: for its profile.
  """
  program = next(filter(None, map(shutil.which, _NAMES)), None)
  if program is None:
    pytest.skip(f"no browser on PATH: {', '.join(_NAMES)}")
  profile = directory / "browser"
  command = [program, *(f"--{flag}" for flag in _FLAGS.split())]
  with subprocess.Popen(
    [*command, f"--user-data-dir={profile}", "about:blank"],
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  ) as process:
    try:
      address = _address(profile / "DevToolsActivePort", process)
      with client.connect(address, max_size=None) as socket:
        yield Browser(socket)
    finally:
      process.terminate()
      process.wait(_START_S)


def _address(file: pathlib.Path, process: subprocess.Popen) -> str:
  """Returns the address of the first page's protocol, once there is one."""
  end_s = time.monotonic() + _START_S
  while time.monotonic() < end_s:
    assert process.poll() is None, "the browser has ended"
    # Written in two steps: the port first.
    lines = file.read_text().split() if file.exists() else []
    if len(lines) == 2:
      url = f"http://127.0.0.1:{lines[0]}/json/list"
      with urllib.request.urlopen(url, timeout=_START_S) as reply:
        pages = [one for one in json.load(reply) if one["type"] == "page"]
      if pages:
        return pages[0]["webSocketDebuggerUrl"]
    time.sleep(0.02)
  raise TimeoutError(f"the browser did not start in {_START_S} s")
