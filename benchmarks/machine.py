"""The machine that a benchmark ran on, and the results that it leaves."""

import contextlib
import json
import os
import pathlib
import platform
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

_RESULTS = pathlib.Path(__file__).parent / "results"


def keep(name: str, **result: Any) -> None:
  """Writes a result and the machine to benchmarks/results/<name>.json."""
  _RESULTS.mkdir(exist_ok=True)
  text = json.dumps({"machine": describe(), **result}, indent=2)
  (_RESULTS / f"{name}.json").write_text(text + "\n")


def describe() -> str:
  """Returns processor, cores, Python, jax and backend."""
  return (
    f"{_processor()}, {os.cpu_count()} cores, Python "
    f"{platform.python_version()}, jax {jax.__version__} on "
    f"{jax.default_backend()}"
  )


def show(title: str, rows: Iterable[Mapping[str, Any]]) -> None:
  """Prints rows that have the same keys."""
  print(f"\n{title}")
  cells = [{k: _cell(v) for k, v in row.items()} for row in rows]
  widths = {
    key: max(len(key), *(len(row[key]) for row in cells)) for key in cells[0]
  }
  print("  " + "  ".join(f"{key:>{width}}" for key, width in widths.items()))
  for row in cells:
    line = "  ".join(f"{row[k]:>{w}}" for k, w in widths.items())
    print(f"  {line}", flush=True)


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
  """Returns the median of each column."""
  return {
    name: statistics.median(row[name] for row in rows) for name in rows[0]
  }


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
  """Returns the median by its name, and beside it the least and the most."""
  return {
    name: statistics.median(values),
    f"{name} min": min(values),
    f"{name} max": max(values),
  }


def timed(call: Callable[[], Any]) -> tuple[float, float]:
  """Returns the wall and CPU seconds of a call, waiting for its arrays."""
  wall, cpu = time.monotonic(), time.process_time()
  jax.block_until_ready(call())
  return time.monotonic() - wall, time.process_time() - cpu


@contextlib.contextmanager
def asked(command: Sequence[str]) -> Iterator[Callable[[str], Any]]:
  """Yields a function that sends a process a line and returns its JSON answer.

  The process ends with its input.

  Raises:
    RuntimeError: it did not begin with "ready".
  """
  with subprocess.Popen(
    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
  ) as process:
    questions, answers = process.stdin, process.stdout
    assert questions is not None
    assert answers is not None
    if answers.readline().strip() != "ready":
      raise RuntimeError(f"{' '.join(command)} failed; see above")

    def ask(line: str) -> Any:
      questions.write(f"{line}\n")
      questions.flush()
      return json.loads(answers.readline())

    yield ask
    questions.close()


def cpu_s(pids: Sequence[int]) -> float:
  """Returns the CPU seconds of this process and of others that run."""
  ticks = 0
  for pid in pids:
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1]
    ticks += sum(map(int, fields.split()[11:13]))
  return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def children_s() -> float:
  """Returns the CPU time of all children that have ended, in seconds."""
  used = resource.getrusage(resource.RUSAGE_CHILDREN)
  return used.ru_utime + used.ru_stime


def _cell(value: Any) -> str:
  return f"{value:.3g}" if isinstance(value, float) else str(value)


def _processor() -> str:
  try:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
  except OSError:
    return platform.processor() or platform.machine()
  names = (line.split(":", 1)[1].strip() for line in lines if "model name" in
           line)  # fmt: skip
  return next(names, platform.machine())
