"""Runs whose engines a backend has started: the same bits, whatever is lost."""

import os
import pathlib
import signal
import subprocess

import pytest

from launch.report import log_check
from tests.helpers import backends_under_test as under_test
from tests.helpers import commands, processes

pytestmark = pytest.mark.slow

REMOTE = {"placement.decode_processes": "1"}


def offer(token_file, *arguments):
  """Starts `launch.host`; returns its process and its address."""
  started = commands.start(
    "launch.host",
    "--listen=127.0.0.1:0",
    f"--token_file={token_file}",
    *arguments,
  )
  assert started.stdout is not None
  line = started.stdout.readline()
  assert "listening at " in line, line
  return started, line.split()[-1]


@pytest.fixture(scope="module")
def params_alone(tmp_path_factory):
  run_dir = tmp_path_factory.mktemp("alone")
  settings = commands.TINY | commands.SYNC
  done = commands.launch(*commands.train(run_dir, settings))
  assert done.returncode == 0, done.stdout + done.stderr
  return processes.saved_params(run_dir, 4)


def check_same_bits(run_dir, backend, expected):
  settings = commands.TINY | commands.SYNC | REMOTE
  train = commands.train(run_dir, settings)
  done = commands.launch(*train, f"--backend={backend}")
  assert done.returncode == 0, done.stdout + done.stderr
  assert processes.saved_params(run_dir, 4) == expected
  assert log_check.of_run(run_dir).violations == []


def test_engines_at_addresses_sample_what_those_of_one_process_do(
  tmp_path, params_alone
):
  token_file = under_test.token_file(tmp_path)
  host, address = offer(token_file)
  with host:
    backend = f"addresses(at=[{address!r}], token_file='{token_file}')"
    check_same_bits(tmp_path / "run", backend, params_alone)
    host.send_signal(signal.SIGTERM)
    # A pod of Kubernetes that is moved away must not count as complete.
    assert host.wait(processes.DEADLINE_S) == 128 + signal.SIGTERM


@pytest.mark.parametrize("name", under_test.CLUSTERS)
def test_engines_of_a_cluster_sample_what_those_of_one_process_do(
  tmp_path, params_alone, name
):
  if name == "slurm":
    backend = "slurm(cluster=local)"
    check_same_bits(tmp_path / "run", backend, params_alone)
    return
  with under_test.cluster(1, 1) as (address, _):
    backend = f"ray(address={address!r})"
    check_same_bits(tmp_path / "run", backend, params_alone)


def lose(run_dir, process, kill, number):
  """Kills a host, and waits until its engine has come back elsewhere."""
  kill()
  processes.until(
    lambda: len(processes.events(run_dir, "engine_back")) == number, process
  )
  before = processes.rounds(run_dir)
  processes.until(lambda: processes.rounds(run_dir) > before + 2, process)


def end(run_dir, process, num_lost):
  process.send_signal(signal.SIGINT)
  output = process.communicate(timeout=processes.DEADLINE_S)[0]
  assert process.returncode == 128 + signal.SIGINT, output
  assert "error 0" in output
  assert len(processes.events(run_dir, "engine_lost")) == num_lost
  assert log_check.of_run(run_dir).violations == []


def test_an_engine_whose_host_is_killed_comes_back_on_another(tmp_path):
  token_file, run_dir = under_test.token_file(tmp_path), tmp_path / "run"
  (one, first), (other, second) = offer(token_file), offer(token_file)
  backend = f"addresses(at=['{first}', '{second}'], token_file='{token_file}')"
  settings = commands.TINY | REMOTE | {"rounds": "4000"}
  train = commands.train(run_dir, settings)
  with one, other, commands.start(*train, f"--backend={backend}") as process:
    processes.until(lambda: processes.rounds(run_dir) >= 2, process)
    (worker,) = processes.workers_of(one)
    assert processes.workers_of(other) == []
    lose(run_dir, process, one.kill, 1)
    assert not processes.runs(worker)
    assert len(processes.workers_of(other)) == 1
    end(run_dir, process, 1)
    other.terminate()
  assert processes.workers_of(other) == []


@pytest.mark.parametrize("name", [under_test.RAY])
def test_an_engine_comes_back_when_its_worker_or_its_raylet_is_killed(
  tmp_path, name
):
  del name
  # The head has no room for it: two others have.
  with under_test.cluster(0, 1, 1) as (address, raylets):
    settings = commands.TINY | REMOTE | {"rounds": "4000"}
    train = commands.train(tmp_path, settings)
    backend = f"--backend=ray(address='{address}')"
    with commands.start(*train, backend) as process:
      processes.until(lambda: processes.rounds(tmp_path) >= 2, process)
      (worker,) = workers(raylets)
      lose(tmp_path, process, lambda: os.kill(worker, signal.SIGKILL), 1)
      (worker,) = workers(raylets)
      (raylet,) = set(raylets) & {*ancestors(worker)}
      lose(tmp_path, process, lambda: os.kill(raylet, signal.SIGKILL), 2)
      assert not processes.runs(worker)
      end(tmp_path, process, 2)
    assert under_test.is_gone(worker)


def workers(raylets) -> list[int]:
  """Returns the process ids of the workers below some raylets."""
  found = subprocess.run(
    ["pgrep", "-f", "launch.worker$"], capture_output=True, text=True
  )
  return [
    pid
    for pid in map(int, found.stdout.split())
    if processes.runs(pid) and {*raylets} & {*ancestors(pid)}
  ]


def ancestors(pid):
  """Yields the process ids of a parent, of its parent, and so on."""
  while pid > 1:
    try:
      stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # It has just ended.
      return
    pid = int(stat.rsplit(")", 1)[1].split()[1])
    yield pid
