"""Each backend, with the hosts that it needs, and programs that are scripts."""

import contextlib
import importlib.util
import os
import pathlib
import pickle
import subprocess
import sys
import threading
import time
import unittest.mock
from collections.abc import Iterator

import pytest

from rl.backends import (
  addresses,
  contract,
  host,
  local,
  slurm,
  xm_experiment,
)
from tests.helpers import machine_speed

TOKEN = "a token of the tests"
DEADLINE_S = machine_speed.scaled(120)
SILENCE_S = 4.0


def _needing(package: str, name: str, command: str = "make backends"):
  """Returns a parameter that is skipped aloud without a package."""
  missing = importlib.util.find_spec(package) is None
  reason = f"without {package}, which `{command}` has"
  return pytest.param(name, marks=pytest.mark.skipif(missing, reason=reason))


RAY = _needing("ray", "ray")
CLUSTERS = [_needing("submitit", "slurm"), RAY]
XM = _needing("xmanager", "xm", "make xm")
EACH = [*map(pytest.param, ("local", "addresses")), *CLUSTERS, XM]


def token_file(folder: pathlib.Path) -> pathlib.Path:
  """Returns a file with the token, for its user alone."""
  path = folder / "token"
  path.touch(0o600)
  path.write_text(TOKEN)
  return path


@contextlib.contextmanager
def listening(
  slots: int = 8, only: str = "", token: str = TOKEN
) -> Iterator[host.Host]:
  """A host that starts programs, in threads of this process."""
  server = host.Host((local.LOOPBACK, 0), token, slots, only)
  thread = threading.Thread(
    target=server.serve_forever, kwargs={"poll_interval": 0.05}
  )
  thread.start()
  try:
    yield server
  finally:
    server.shutdown()
    thread.join()
    server.close()


@contextlib.contextmanager
def cluster(*cpus: int) -> Iterator[tuple[str, list[int]]]:
  """A Ray of as many raylets; yields its address, and their processes."""
  from ray import cluster_utils  # pyright: ignore[reportMissingImports]

  made = cluster_utils.Cluster()
  try:
    nodes = [made.add_node(num_cpus=count, num_gpus=0) for count in cpus]
    made.wait_for_nodes()
    yield made.address, [_raylet(node) for node in nodes]
  finally:
    made.shutdown()


def _raylet(node) -> int:
  (info,) = node.all_processes["raylet"]
  return info.process.pid


@contextlib.contextmanager
def up(name: str, folder: pathlib.Path) -> Iterator[contract.Backend]:
  """A backend of a name, with the hosts that it needs."""
  match name:
    case "local":
      yield local.Local()
    case "addresses":
      file = token_file(folder)
      with listening() as one, listening() as other:
        yield addresses.KnownAddresses(
          at=(one.address, other.address), token_file=str(file)
        )
    case "slurm":
      yield slurm.Slurm(cluster="local", silence_s=SILENCE_S)
    case "xm":
      # It keeps a list of experiments there.
      with unittest.mock.patch.dict(os.environ, HOME=str(folder)):
        yield xm_experiment.Xm(silence_s=SILENCE_S)
    case "ray":
      from rl.backends import ray_cluster

      with cluster(2, 2) as (address, _):
        yield ray_cluster.Ray(address=address, cpus=0.5)
    case _:
      raise AssertionError(name)


def scripted(
  folder: pathlib.Path, name: str, body: str, *arguments: str, **fields
) -> contract.Program:
  """Returns a program that runs a script of Python in place of this project.

  Its arguments follow two of Python itself: `-m` and the module.
  """
  folder.mkdir(parents=True, exist_ok=True)
  script = folder / f"{name}.py"
  script.write_text(f"#!{sys.executable}\n{body}\n")
  script.chmod(0o755)
  return contract.Program(
    name=name,
    module="launch.worker",
    arguments=arguments,
    log=folder / "logs" / f"{name}.log",
    python=str(script),
    **fields,
  )


def ended(process: contract.Started) -> int:
  """Returns the code of a process, after waiting for it."""
  code = contract.wait(process, DEADLINE_S)
  assert code is not None
  return code


def says(program: contract.Program, words: str) -> str:
  """Returns the log of a program, after waiting for words in it."""
  deadline, text = time.monotonic() + DEADLINE_S, ""
  while time.monotonic() < deadline:
    text = program.log.read_text() if program.log.exists() else ""
    if words in text:
      return text
    time.sleep(0.02)
  raise AssertionError(f"{words} is not in {text}")


def is_gone(pid: int) -> bool:
  """Returns whether a process ends in time."""
  deadline = time.monotonic() + DEADLINE_S
  while time.monotonic() < deadline:
    try:
      state = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1]
    except OSError:
      return True
    if state.split()[0] in "ZX":
      return True
    time.sleep(0.02)
  return False


def starter(
  backend: contract.Backend, program: contract.Program, folder: pathlib.Path
) -> subprocess.Popen:
  """Starts another process that starts a program, and then waits."""
  data = pickle.dumps((backend, program, folder))
  code = (
    "import pickle, time\n"
    f"backend, program, folder = pickle.loads({data!r})\n"
    "process = backend.open(folder).start(program)\n"
    "time.sleep(600)\n"
  )
  root = pathlib.Path(__file__).parents[2]
  return subprocess.Popen([sys.executable, "-c", code], cwd=root)
