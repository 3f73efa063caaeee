"""The benchmark of long runs, in small: what it samples, and how it grows."""

import pytest

from benchmarks import long_run


def test_a_simulated_run_is_sampled_and_its_log_keeps_every_promise(tmp_path):
  found = long_run.simulated(12, tmp_path)
  # 12 rounds of 2 groups of 2 members, and a sample after each.
  assert found["episodes"] == 48
  assert [sample["round"] for sample in found["samples"]] == [*range(1, 13)]
  assert (found["violations"], found["ledger_error"]) == ([], 0)
  assert found["events"] > 5 * 48
  assert found["events_disk_mib"] > 0
  # Far from a segment, so nothing of its log is deleted.
  assert (found["whole_from"], found["segments_deleted"]) == (1, 0)
  assert found["trained_groups"] == 24
  for key in ("resident_mib", "descriptors", "threads", "tasks"):
    assert all(sample[key] > 0 for sample in found["samples"])


def test_growth_is_from_the_second_quarter_to_the_last():
  samples = [{"round": i, "x": float(i + 1), "y": 2.0} for i in range(8)]
  # Of rounds 2, 3: (3 + 4) / 2 = 3.5; of rounds 6, 7: 7.5.
  grown = long_run.growth(samples)
  assert grown == {"x": 7.5 / 3.5 - 1, "y": 0.0}
  assert long_run.growth(samples[:3]) == {}


def test_slices_of_several_sittings_are_one_run(tmp_path, monkeypatch):
  began = []

  def trained(run_dir, seconds, is_killed, number):
    began.append((seconds, is_killed, number))
    if len(began) == 3:
      raise KeyboardInterrupt
    return {"seconds": seconds, "samples": [{"seconds": 1.0, "round": number}]}

  monkeypatch.setattr(long_run, "_slice", trained)
  monkeypatch.setattr(long_run, "_verdict", lambda run_dir: {})
  with pytest.raises(KeyboardInterrupt):
    long_run.real(20.0, 5.0, str(tmp_path))
  found = long_run.real(20.0, 5.0, str(tmp_path))
  # The third was lost; the second and no other but the last was to be killed.
  assert began == [
    (300.0, False, 0),
    (300.0, True, 1),
    (300.0, False, 2),
    (300.0, False, 2),
    (300.0, False, 3),
  ]
  seconds = [sample["seconds"] for sample in found["samples"]]
  assert seconds == [1, 301, 601, 901]
