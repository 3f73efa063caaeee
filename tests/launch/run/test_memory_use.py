"""Peaks of memory: of the process, and of the fullest device."""

import dataclasses
import math

from launch.run import memory_use


@dataclasses.dataclass
class Device:
  """A device as jax has it."""

  stats: dict | None

  def memory_stats(self):
    return self.stats


def test_the_fullest_device_counts():
  devices = [Device({"peak_bytes_in_use": n}) for n in (3, 8, 5)]
  assert memory_use.metrics(devices)["device_memory_bytes"] == 8.0


def test_devices_that_do_not_tell_have_no_peak():
  found = memory_use.metrics([Device(None), Device({"bytes_in_use": 3})])
  assert math.isnan(found["device_memory_bytes"])
  found = memory_use.metrics([Device(None), Device({"peak_bytes_in_use": 3})])
  assert found["device_memory_bytes"] == 3.0


def test_the_peak_of_the_process_is_in_bytes_and_never_falls():
  before = memory_use.metrics([])["host_memory_bytes"]
  # An interpreter with numpy takes over 10 MiB, and no test machine 1 PiB.
  assert 10 * 2**20 < before < 2**50
  assert memory_use.metrics([])["host_memory_bytes"] >= before
