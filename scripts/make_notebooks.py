"""Executes notebooks/*.py, and keeps each with its outputs as .ipynb.

  make notebooks
  make notebooks ARGS=first_steps

The percent script is the source; jupytext reads it and nbclient executes it.
Outputs are true: tests/test_notebooks.py executes each once more and compares.
A cell with the tag "varies" has outputs that differ from run to run or from
machine to machine, which is not compared.
"""

import copy
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Sequence

import jupytext
import nbclient
import nbformat

ROOT = pathlib.Path(__file__).parents[1]
SCRIPTS = tuple(sorted((ROOT / "notebooks").glob("*.py")))

_KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
_TIMEOUT_S = 600  # Of a cell, on a busy machine.


def read(script: pathlib.Path) -> nbformat.NotebookNode:
  """Returns the notebook of a percent script, without outputs."""
  notebook = jupytext.read(script)
  notebook.metadata = {"kernelspec": _KERNEL}
  for number, cell in enumerate(notebook.cells):
    cell.id = f"{script.stem}-{number}"
    cell.metadata = {
      key: value for key, value in cell.metadata.items() if key == "tags"
    }
  return notebook


def execute(
  notebook: nbformat.NotebookNode, checks: Sequence[str] = ()
) -> nbformat.NotebookNode:
  """Returns the notebook with the outputs of its cells.

  Its files lie in a directory that is gone afterwards.

  Args:
    checks: expressions in names of the notebook, which must be true at its end.

  Raises:
    nbclient.exceptions.CellExecutionError: a cell raised, or a check is false.
  """
  executed = copy.deepcopy(notebook)
  for check in checks:
    text = f"assert {check}, {check!r}"
    executed.cells.append(nbformat.v4.new_code_cell(text))
  with tempfile.TemporaryDirectory() as directory:
    nbclient.NotebookClient(
      executed,
      kernel_name=_KERNEL["name"],
      timeout=_TIMEOUT_S,
      record_timing=False,
      coalesce_streams=True,
      resources={"metadata": {"path": directory}},
    ).execute()
  del executed.cells[len(notebook.cells) :]
  for cell in executed.cells:
    for output in cell.get("outputs", []):
      # It would put what is transparent on a ground of one colour.
      output.get("metadata", {}).clear()
  executed.metadata = notebook.metadata
  return executed


def texts(cell: nbformat.NotebookNode) -> Iterator[tuple[str, str]]:
  """Yields (kind, text) of each output of a cell.

  A picture or a page has no text: their bytes depend on versions of libraries.
  """
  for output in cell.get("outputs", []):
    if output.output_type == "stream":
      yield output.name, output.text
      continue
    kinds = sorted(output.data)
    is_text = kinds == ["text/plain"]
    yield ", ".join(kinds), output.data["text/plain"] if is_text else ""


def main(names: Sequence[str]) -> None:
  """Executes and keeps the notebooks of these names, or all."""
  for script in SCRIPTS:
    if names and script.stem not in names:
      continue
    print(script.stem, flush=True)
    target = script.with_suffix(".ipynb")
    nbformat.write(execute(read(script)), target)


if __name__ == "__main__":
  main(sys.argv[1:])
