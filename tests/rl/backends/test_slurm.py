"""What is asked of Slurm for a program."""

import os
import pathlib
import socket
import types

import pytest

from rl.backends import slurm


def test_a_step_has_the_processors_of_its_job():
  asked = slurm.Slurm(cpus=4, gpus=1, partition="a")._parameters()
  assert asked == {
    "cpus_per_task": 4,
    "gpus_per_node": 1,
    "slurm_partition": "a",
    "slurm_srun_args": ["--cpus-per-task=4"],
  }
  assert "slurm_srun_args" not in slurm.Slurm(gpus=1)._parameters()


def test_a_job_of_slurm_knows_nothing_of_the_job_that_asks_for_it(
  tmp_path, monkeypatch
):
  pytest.importorskip("submitit")
  seen = []

  class Executor:
    def submit(self, *_):
      seen.append(dict(os.environ))

  monkeypatch.setenv("SLURM_MEM_PER_CPU", "1000")
  slurm._SlurmLauncher(Executor(), tmp_path, "", 1)._submit(tmp_path)
  assert not [name for name in seen[0] if name.startswith("SLURM_")]
  assert os.environ["SLURM_MEM_PER_CPU"] == "1000"


@pytest.mark.parametrize(
  ("done", "state", "ended"),
  [
    (True, "OUT_OF_MEMORY", True),
    (False, "PREEMPTED", True),
    (True, "SUSPENDED", False),
    (False, "RUNNING", False),
  ],
)
def test_a_job_that_is_suspended_has_not_ended(done, state, ended):
  job = types.SimpleNamespace(done=lambda: done, state=state)
  assert slurm._Job(job).ended() is ended


def test_a_name_of_this_host_that_other_hosts_cannot_use_is_refused(
  monkeypatch,
):
  # As Debian has it in /etc/hosts.
  found = [(0, 0, 0, "", ("127.0.1.1", 0))]
  monkeypatch.setattr(socket, "getfqdn", lambda: "login1")
  monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
  launcher = slurm._SlurmLauncher(None, pathlib.Path(), None, 1)
  with pytest.raises(ValueError, match=r"login1, has no .* 127\.0\.1\.1"):
    _ = launcher.host
  found.append((0, 0, 0, "", ("10.0.0.5", 0)))
  assert launcher.host == "login1"
