"""Runs the commands of `launch`: in a process of their own, or in this one."""

import contextlib
import dataclasses
import importlib
import importlib.util
import io
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import TextIO

from absl import flags as absl_flags
from absl.testing import flagsaver

from launch.cli import flags
from tests.helpers import machine_speed

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = "configs/guess_number_moe.py"
_END_S = machine_speed.scaled(240)
# One shape for all: its programs are compiled once and then found in the cache.
TINY = {
  "rounds": "4",
  "model.num_layers": "2",
  "model.d_model": "32",
  "model.d_expert": "32",
  "model.num_heads": "2",
  "model.head_dim": "16",
  "rollout.group_size": "4",
  "engine.slots": "32",
  "engine.row_buckets": "32,",
  "engine.chunk_buckets": "8,",
  "overlap.groups_per_round": "4",
  "overlap.groups_per_microbatch": "2",
  "batch.rows": "8",
  "warm_start": "none",
  "evaluation.episodes": "16",
  "evaluation.every": "2",
  "retention.checkpoint_every": "2",
  "retention.episodes_every": "2",
}
SYNC = {
  "overlap.max_staleness": "0",
  "overlap.wait_for_round": "true",
  "overlap.on_publish": "drain",
  # Log-probabilities of the engine vary in their last bit with the rows that
  # share a dispatch.
  "overlap.old_logprob": "snapshot",
}
"""Makes runs that are equal bit for bit."""


@dataclasses.dataclass(frozen=True)
class Result:
  """Exit code and output of a command."""

  returncode: int
  stdout: str
  stderr: str


def train(workdir, settings=None, config=CONFIG) -> list[str]:
  """Returns the arguments of launch.train, TINY by default."""
  settings = TINY if settings is None else settings
  return [
    "launch.train",
    f"--config={config}",
    f"--workdir={workdir}",
    *flags.arguments(settings),
  ]


def start(module, *arguments, **options) -> subprocess.Popen[str]:
  """Starts a command as a user would: without the test suite's XLA flags."""
  environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  return subprocess.Popen(
    [sys.executable, "-m", module, *map(str, arguments)],
    cwd=ROOT,
    env=environment,
    stdin=subprocess.DEVNULL,
    stdout=subprocess.PIPE,
    text=True,
    **{"stderr": subprocess.STDOUT, **options},
  )


def launch(module, *arguments) -> Result:
  """Runs a command in a process of its own."""
  with start(module, *arguments, stderr=subprocess.PIPE) as process:
    try:
      output, errors = process.communicate(timeout=_END_S)
    except BaseException:
      process.kill()
      raise
  return Result(process.returncode, output, errors)


def run(module, *arguments, stderr: TextIO | None = None) -> Result:
  """Runs a command in this process, which saves the import of jax.

  Args:
    stderr: takes its errors in the place of the result.
  """
  # Its flags, defined on import, must be there before others are saved.
  importlib.import_module("grain")
  output, errors = io.StringIO(), io.StringIO()
  with (
    _without_flags_of_commands(),
    flagsaver.flagsaver(),
    contextlib.chdir(ROOT),
    contextlib.redirect_stdout(output),
    contextlib.redirect_stderr(stderr or errors),
  ):
    try:
      spec = importlib.util.find_spec(module)
      assert spec is not None
      assert spec.loader is not None
      command = importlib.util.module_from_spec(spec)
      spec.loader.exec_module(command)
      command.main(flags.parse([module, *map(str, arguments)]))
      code = 0
    except SystemExit as end:
      code = end.code or 0
      if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
  return Result(code, output.getvalue(), errors.getvalue())


@contextlib.contextmanager
def _without_flags_of_commands() -> Iterator[None]:
  """Takes the flags of imported commands out: --run is a flag of several."""
  registered = absl_flags.FLAGS.flags_by_module_dict()
  ours = [
    (module, flag)
    for module, found in registered.items()
    for flag in found
    if module.startswith("launch.") and not module.startswith("launch.cli.")
  ]
  for _, flag in ours:
    delattr(absl_flags.FLAGS, flag.name)
  try:
    yield
  finally:
    for module, flag in ours:
      absl_flags.FLAGS[flag.name] = flag
      absl_flags.FLAGS.register_flag_by_module(module, flag)
