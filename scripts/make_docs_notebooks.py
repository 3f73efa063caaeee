"""Hook of mkdocs: a page for each kept notebook, and the file to download.

Cells of code are followed by the outputs that are kept: no kernel runs while
the site is built, and nothing of ours is imported.
"""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

from mkdocs.config import defaults
from mkdocs.structure import files as files_lib

FOLDER = pathlib.Path(__file__).parents[1] / "notebooks"


def on_files(
  files: files_lib.Files, config: defaults.MkDocsConfig
) -> files_lib.Files:
  """Adds the pages and the notebooks; docs/notebooks.md leads to the pages."""
  for kept in sorted(FOLDER.glob("*.ipynb")):
    text = kept.read_text("utf-8")
    named = {
      f"notebooks/{kept.name}": text,
      f"notebooks/{kept.stem}.md": page(kept.name, json.loads(text)),
    }
    for path, content in named.items():
      file = files_lib.File.generated(config, path, content=content)
      file.inclusion = files_lib.InclusionLevel.NOT_IN_NAV
      files.append(file)
  return files


def page(name: str, notebook: dict[str, Any]) -> str:
  """Returns a notebook as Markdown."""
  first, *cells = notebook["cells"]
  parts = ["".join(first["source"]), f"[The notebook]({name}), to run it."]
  for cell in cells:
    source = "".join(cell["source"])
    if "colab" in cell["metadata"].get("tags", []):
      continue
    if cell["cell_type"] == "markdown":
      parts.append(source)
    else:
      parts += [f"```python\n{source}\n```", *_outputs(cell["outputs"])]
  return "\n\n".join(parts) + "\n"


def _outputs(outputs: list[dict[str, Any]]) -> Iterator[str]:
  for output in outputs:
    data = output.get("data", {})
    if "text/html" in data:
      yield "".join(data["text/html"])
    elif "image/png" in data:
      picture = "".join(data["image/png"]).replace("\n", "")
      yield f"![output](data:image/png;base64,{picture})"
    else:
      text = "".join(output.get("text") or data["text/plain"])
      yield f"```text\n{text.rstrip()}\n```"
