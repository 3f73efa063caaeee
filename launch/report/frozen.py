"""The page of a run, or of a sweep, as one file without a server or network.

  static/index.html + style.css + modules in the order of their imports + data

In one script the modules share a scope, so no two of them define one name.
"""

import base64
import hashlib
import html
import json
import math
import pathlib
import re
from typing import Any

STATIC = pathlib.Path(__file__).parent / "static"
"""The files of the page, as `launch.view` serves them."""

_IMPORT = re.compile(r'^import [^;]*? from "\./([\w.]+)";\n', re.MULTILINE)
_EXPORT = re.compile(
  r"^export (?=const |function |async function |class )", re.M
)
_TITLE = "<title>Twinmesh</title>"
_LINK = '<link rel="stylesheet" href="style.css">'
_SCRIPT = '<script type="module" src="live.js"></script>'


def page(title: str, data: Any, entry: str = "frozen.js") -> str:
  """Returns the page.

  Args:
    title: of the run, or of the sweep.
    data: JSON data of the module `entry`.
  """
  style = (STATIC / "style.css").read_text("utf-8")
  script = f"\n{bundle(entry)}"
  policy = (
    f"default-src 'none'; script-src '{_digest(script)}'; "
    f"style-src '{_digest(style)}'; base-uri 'none'; form-action 'none'"
  )
  # JSON may hold "</script>" only inside strings, where "<" can be escaped.
  text = json_text(data).replace("<", "\\u003c")
  parts = {
    _LINK: (
      f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
      f"<style>{style}</style>"
    ),
    _SCRIPT: (
      f'<script type="application/json" id="data">{text}</script>\n'
      f'<script type="module">{script}</script>'
    ),
    _TITLE: f"<title>{html.escape(title)} · Twinmesh</title>",
  }
  found = (STATIC / "index.html").read_text("utf-8")
  # One pass, so that text of the run that looks like a place stays.
  places = "|".join(map(re.escape, parts))
  return re.sub(places, lambda place: parts[place[0]], found)


def bundle(entry: str) -> str:
  """Returns a module and those that it imports as one script."""
  texts: dict[str, str] = {}

  def visit(name: str) -> None:
    if name in texts:
      return
    text = (STATIC / name).read_text("utf-8")
    texts[name] = ""  # Before those that it imports: a circle ends here.
    for imported in _IMPORT.findall(text):
      visit(imported)
    del texts[name]
    texts[name] = _EXPORT.sub("", _IMPORT.sub("", text))

  visit(entry)
  return "\n".join(texts.values())


def _digest(text: str) -> str:
  digest = hashlib.sha256(text.encode()).digest()
  return f"sha256-{base64.b64encode(digest).decode()}"


def json_text(data: Any) -> str:
  """Returns JSON that a browser reads; numbers that are not finite are null."""
  try:
    return json.dumps(data, allow_nan=False, separators=(",", ":"))
  except ValueError:
    return json.dumps(finite(data), allow_nan=False, separators=(",", ":"))


def finite(data: Any) -> Any:
  """Returns JSON data with null for numbers that are not finite."""
  if isinstance(data, dict):
    return {key: finite(value) for key, value in data.items()}
  if isinstance(data, list | tuple):
    return [finite(value) for value in data]
  if isinstance(data, float) and not math.isfinite(data):
    return None
  return data
