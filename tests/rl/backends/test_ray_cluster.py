"""Programs on a Ray of two raylets: places that cannot be had, hosts lost."""

import os
import signal
import threading

import pytest

from tests.helpers import backends_under_test as under_test
from tests.helpers import machine_speed

WAITS = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
pytestmark = pytest.mark.process
ray_cluster = pytest.importorskip("rl.backends.ray_cluster")
ray = pytest.importorskip(
  "ray", reason="without ray, which `make backends` has"
)


def test_a_cluster_that_does_not_answer_is_given_up(monkeypatch, tmp_path):
  never = threading.Event()
  monkeypatch.setattr(ray, "init", lambda *_, **__: never.wait())
  setting = ray_cluster.Ray(address="192.0.2.1:6379", place_s=0.1)
  with pytest.raises(ValueError, match=r"no Ray answers: nothing came in 0.1"):
    setting.open(tmp_path)
  never.set()


@pytest.fixture(scope="module")
def cluster():
  with under_test.cluster(1, 2) as made:
    yield made


def test_a_place_that_cannot_be_had_is_refused_with_what_is_free(
  cluster, tmp_path
):
  address, _ = cluster
  place_s = machine_speed.scaled(4)  # For the cluster to answer, too.
  setting = ray_cluster.Ray(
    address=address, cpus=8, resources={"tpu": 4}, place_s=place_s
  )
  launcher = setting.open(tmp_path)
  try:
    program = under_test.scripted(tmp_path, "wide", "")
    process = launcher.start(program)
    assert under_test.ended(process) != 0
    refusal = f"no host has had CPU 8, tpu 4 free in {place_s:g} s; free now: "
    assert refusal in process.reason
    _, _, free = process.reason.partition("free now: ")
    *hosts, out = free.split("; ")
    # Hosts come in no order.
    amounts = {host.partition(" ")[2] for host in hosts}
    assert amounts == {"CPU 1", "CPU 2"}
    assert out == "lower it, or add a host"
  finally:
    launcher.close()


def test_a_program_whose_raylet_is_killed_is_lost_and_gone(cluster, tmp_path):
  address, raylets = cluster
  launcher = ray_cluster.Ray(address=address, cpus=2).open(tmp_path)
  try:
    program = under_test.scripted(tmp_path, "waits", WAITS)
    process = launcher.start(program)
    pid = int(under_test.says(program, "\n"))
    # The second raylet alone has two cores.
    os.kill(raylets[1], signal.SIGKILL)
    assert under_test.ended(process) != 0
    assert "Ray has lost it" in process.reason
    assert under_test.is_gone(pid)
  finally:
    launcher.close()
