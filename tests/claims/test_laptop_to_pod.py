"""The page "From a laptop to a pod": its commands, in their order, on one host.

Runs are small, hosts and clusters are on this machine, and steps whose package
is missing are left out, which is said.
"""

import collections
import contextlib
import importlib.util
import json
import pathlib
import re
import warnings

import pytest

from launch.cli import flags
from launch.report import log_check
from tests.claims import test_backends_run
from tests.helpers import backends_under_test as under_test
from tests.helpers import commands, markdown, processes

pytestmark = pytest.mark.slow

PAGE = commands.ROOT / "docs/guides/from-a-laptop-to-a-pod.md"
COMMANDS = [command[2:] for command in markdown.commands(PAGE)]
TRAIN = [x for x in COMMANDS if x[0] == "launch.train"]
# Settings that the sweep of the config varies are left to it.
VARIED = ("seed", "algorithm")


def backend_of(command) -> str:
  """Returns the name of the backend that a command asks for."""
  (given,) = [x for x in command if x.startswith("--backend=")] or ["=local"]
  return re.split(r"[=(]", given)[1]


@contextlib.contextmanager
def up(name, folder):
  """Starts what a backend needs; yields its setting, None without a package."""
  package = {"slurm": "submitit", "ray": "ray"}.get(name)
  if package and importlib.util.find_spec(package) is None:
    warnings.warn(f"without {package}, its step is left out", stacklevel=1)
    yield None
  elif name == "addresses":
    file = under_test.token_file(folder)
    host, address = test_backends_run.offer(file, "--slots=3")
    with host:
      yield f"addresses(at=['{address}'], token_file='{file}')"
      host.terminate()
  elif name == "ray":
    with under_test.cluster(2) as (address, _):
      yield f"ray(cpus=1, address='{address}')"
  else:
    yield {"slurm": "slurm(cluster=local)"}.get(name, name)


def test_the_page_has_a_step_for_every_backend():
  assert [backend_of(x) for x in TRAIN] == [
    *("local", "local", "addresses", "addresses", "slurm", "ray")
  ]
  assert list(
    dict.fromkeys(x[0] for x in COMMANDS if x[0] != "launch.train")
  ) == ["launch.host", "launch.sweep", "launch.manifest"]


def test_one_run_goes_on_at_every_step_of_the_page(tmp_path):
  done_rounds = collections.Counter()
  for command in TRAIN:
    with up(backend_of(command), tmp_path) as backend:
      if backend is None:
        continue
      (name,) = [x for x in command if x.startswith("--workdir=")]
      run_dir = tmp_path / pathlib.Path(name).name
      rounds = done_rounds[run_dir] = done_rounds[run_dir] + 2
      small = commands.TINY | {"rounds": str(rounds)}
      kept = [
        x for x in command if not x.startswith(("--workdir", "--backend"))
      ]
      done = commands.launch(
        *kept,
        f"--workdir={run_dir}",
        f"--backend={backend}",
        *flags.arguments(small),
      )
      assert done.returncode == 0, (command, done.stdout + done.stderr)
      assert processes.rounds(run_dir) == rounds
  assert len(done_rounds) == 2
  for run_dir in done_rounds:
    assert log_check.of_run(run_dir).violations == []


def test_the_sweep_of_the_page_runs_and_is_compared(tmp_path):
  first, table = [x for x in COMMANDS if x[0] == "launch.sweep"]
  small = {k: v for k, v in commands.TINY.items() if not k.startswith(VARIED)}
  small |= {"rounds": "1"}
  for command, settings in ((first, flags.arguments(small)), (table, [])):
    given = [x for x in command if not x.startswith("--workdir")]
    done = commands.launch(*given, f"--workdir={tmp_path}", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
  assert "best success" in done.stdout
  assert (tmp_path / "compare.html").exists()
  names = {path.parent.name for path in tmp_path.glob("*/metrics.jsonl")}
  assert len(names) > 1
  configs = [
    json.loads(path.read_text()) for path in tmp_path.glob("run_*/config.json")
  ]
  assert len({str(config) for config in configs}) == len(names)


def test_the_manifest_of_the_page_is_printed():
  (command,) = [x for x in COMMANDS if x[0] == "launch.manifest"]
  assert "kind: JobSet" in commands.run(*command).stdout
  assert pathlib.Path(PAGE).exists()
