"""Tiles and sentences on learning, from rows by hand."""

from launch.report import learning_section


def _tiles(rows):
  found = learning_section.tiles(rows)
  return {label: (value, note) for label, value, note in found}


def test_a_run_begins_and_ends_with_the_mean_of_a_tenth_of_its_rounds():
  # 20 rounds: of two each, 0 and 0.1, then 1.8 and 1.9.
  rows = [{"reward_mean": i / 10, "success": i / 20} for i in range(20)]
  found = _tiles(rows)
  assert found["Reward"] == (
    "0.05 → 1.85",
    "mean of an episode; first and last 2 rounds",
  )
  assert found["Success in training"][0] == "2% → 92%"


def test_a_single_round_is_its_own_first_and_last():
  assert _tiles([{"entropy": 1.25}])["Entropy"] == (
    "1.25 → 1.25",
    "nats a token; first and last round",
  )


def test_only_what_was_recorded_is_told():
  assert learning_section.tiles([]) == []
  rows = [{"clip_fraction": None, "zero_variance_groups": 3.0}]
  assert learning_section.tiles(rows) == []


def test_clips_zero_variance_groups_and_skipped_updates_are_summed_up():
  rows = [
    {"clip_fraction": 0.01, "zero_variance_groups": 1.0, "groups": 4.0},
    {"clip_fraction": 0.03, "zero_variance_groups": 2.0, "groups": 4.0},
  ]
  rows = [row | {"skipped_updates": float(i)} for i, row in enumerate(rows)]
  found = _tiles(rows)
  assert found["Clipped"] == ("2.0%", "of the tokens; in a round at most 3.0%")
  # 3 of 8.
  assert found["Zero-variance groups"] == (
    "38%",
    "3 of 8 groups taught nothing",
  )
  assert found["Skipped updates"] == ("1", "in 1 of 2 rounds")


def test_the_distance_to_the_sampler_is_that_of_the_latest_tokens():
  rows = [
    {"behaviour_kl/lag_0": 0.001, "behaviour_kl/lag_2": None},
    {"behaviour_kl/lag_0": 0.002, "behaviour_kl/lag_1": 0.02},
    {"behaviour_kl/lag_1": 0.04},
  ]
  # No token was two versions late.
  value, note = _tiles(rows)["KL to the sampler"]
  assert value == "0.03"
  assert note == "nats a token, 1 version late; in a round at most 0.04"


def test_bounds_of_another_type_are_said_to_be_none():
  (line,) = learning_section.crossings([], {"bounds": 3})
  assert line == "config.json has no bounds to compare the metrics with."


def test_skipped_updates_are_complained_of_with_a_command(tmp_path):
  rows = [{"round": i, "skipped_updates": float(i > 1)} for i in (1, 2, 3)]
  for number in (2, 3):
    kept = tmp_path / f"skipped/round_00000{number}_update_0"
    kept.mkdir(parents=True)
    (kept / "batches.npz").touch()
  (line,) = learning_section.complaints(rows, tmp_path)
  assert "not finite, in rounds 2, 3. Look into one: python -m launch.r" in line
  assert line.endswith(f"{tmp_path}/skipped/round_000003_update_0")


def test_rounds_that_faults_left_empty_are_complained_of(tmp_path):
  empty = {"trained_tokens": 0.0, "faults": 8.0, "zero_variance_groups": 0.0}
  rows = [{"round": i} | empty for i in range(1, 12)]
  # A group of zero variance is not a fault.
  rows.append({"round": 12} | empty | {"zero_variance_groups": 1.0})
  (line,) = learning_section.complaints(rows, tmp_path)
  assert "in rounds 1, 2, 3, 4, 5, 6, 7, 8 and 3 more; " in line


def test_a_sound_run_has_nothing_to_complain_of(tmp_path):
  rows = [{"round": 1, "skipped_updates": 0.0, "trained_tokens": 9.0}]
  assert learning_section.complaints(rows, tmp_path) == []
