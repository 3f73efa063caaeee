"""Schedules: the presets can run, and what cannot says how it could."""

import dataclasses
import re

import pytest

from rl import overlap


@pytest.mark.parametrize(
  ("fields", "value", "way_out"),
  [
    ({"groups_per_round": 0}, "groups_per_round=0", "at least one"),
    ({"updates_per_round": 0}, "updates_per_round=0", "at least one"),
    ({"groups_per_microbatch": -1}, "groups_per_microbatch=-1", "at least one"),
    # 6 and 32 have the divisor 2 in common; 8 and 32 / 8 = 4 have 4.
    ({"updates_per_round": 6}, "updates_per_round=6", "use 2"),
    (
      {"updates_per_round": 8, "groups_per_microbatch": 8},
      "groups_per_microbatch=8",
      "the 4 groups of an update; use 4",
    ),
    ({"max_staleness": -1}, "max_staleness=-1", "0 is synchronous"),
    (
      {"max_staleness": 1, "on_publish": "recompute", "updates_per_round": 2},
      "updates_per_round=2",
      "use updates_per_round=1",
    ),
    (
      {"max_staleness": 1, "on_publish": "drain"},
      "on_publish='drain'",
      "use on_publish=recompute or keep_kv",
    ),
    # Whatever the bound: it would make faults of what is in flight.
    ({"on_publish": "abort"}, "on_publish='abort'", "use on_publish=recompute"),
    (
      {"max_staleness": 1, "on_publish": "abort"},
      "on_publish='abort'",
      "use on_publish=recompute",
    ),
    # A prefix that all share would be of the first weights for ever.
    ({"on_publish": "keep_kv"}, "on_publish='keep_kv'", "use on_publish=drain"),
  ],
)
def test_a_schedule_that_cannot_run_names_its_value_and_the_way_out(
  fields, value, way_out
):
  with pytest.raises(ValueError, match=re.escape(f"overlap.{value}")) as error:
    overlap.Overlap(**fields).validate()
  assert way_out in str(error.value)


def test_the_default_schedule_can_run():
  overlap.Overlap().validate()


@pytest.mark.parametrize(
  ("max_staleness", "on_publish"),
  [(0, "drain"), (0, "recompute"), (1, "recompute"), (1, "keep_kv")],
)
def test_what_loses_no_trajectory_and_keeps_the_bound_can_run(
  max_staleness, on_publish
):
  overlap.Overlap(max_staleness=max_staleness, on_publish=on_publish).validate()


@pytest.mark.parametrize(
  ("schedule", "waits", "bound", "on_publish"),
  [
    (overlap.sync(32, updates_per_round=4), True, 0, "drain"),
    (overlap.round_pipelined(32, updates_per_round=4), False, 0, "drain"),
    (overlap.in_flight(32, max_staleness=2), False, 2, "recompute"),
    (overlap.in_flight(32, on_publish="keep_kv"), False, 1, "keep_kv"),
  ],
)
def test_a_preset_can_run_and_is_what_its_name_says(
  schedule, waits, bound, on_publish
):
  schedule.validate()
  assert schedule.wait_for_round == waits
  assert schedule.max_staleness == bound
  assert schedule.on_publish == on_publish


@pytest.mark.parametrize(
  ("preset", "fields"),
  [
    (overlap.sync, {"updates_per_round": 2}),
    (overlap.round_pipelined, {"updates_per_round": 2}),
    (overlap.in_flight, {"max_staleness": 3}),
  ],
)
def test_a_preset_passes_its_arguments_on(preset, fields):
  schedule = preset(12, groups_per_microbatch=3, **fields)
  expected = {"groups_per_round": 12, "groups_per_microbatch": 3, **fields}
  assert expected.items() <= dataclasses.asdict(schedule).items()


def test_an_update_sums_its_share_of_the_round():
  # 32 groups over 4 updates.
  assert overlap.sync(32, updates_per_round=4).groups_per_update == 8
