"""Executes notebooks/*.py, and keeps each with its outputs as .ipynb.

  make notebooks
  make notebooks ARGS=first_steps

The percent script is the source; jupytext reads it and nbclient executes it.
Outputs are true: tests/test_notebooks.py executes each once more and compares.
A cell with the tag "varies" has outputs that differ from run to run or from
machine to machine, which is not compared.

The seconds of each, and those of processors, go to
benchmarks/results/notebooks.json. Notebooks that are left out keep theirs.
"""

import copy
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import jupytext
import nbclient
import nbformat

from benchmarks import machine

ROOT = pathlib.Path(__file__).parents[1]
SCRIPTS = tuple(sorted((ROOT / "notebooks").glob("*.py")))

_KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
_TIMEOUT_S = 600  # Of a cell, on a busy machine.
_RESULT = ROOT / "benchmarks" / "results" / "notebooks.json"


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
  rows = json.loads(_RESULT.read_text("utf-8"))["rows"]
  for script in SCRIPTS:
    if names and script.stem not in names:
      continue
    began_s, busy_s = time.monotonic(), machine.children_s()
    with tempfile.TemporaryDirectory() as cache:
      # As for whoever runs it first: no program has been compiled.
      os.environ["XDG_CACHE_HOME"] = cache
      executed = execute(read(script))
    row = {
      "wall_s": time.monotonic() - began_s,
      "cpu_s": machine.children_s() - busy_s,
    }
    print(script.stem, row, flush=True)
    nbformat.write(executed, script.with_suffix(".ipynb"))
    rows[script.stem] = row
    machine.keep("notebooks", rows=dict(sorted(rows.items())))


if __name__ == "__main__":
  main(sys.argv[1:])
