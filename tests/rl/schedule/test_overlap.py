"""Schedules: the presets can run, and what cannot says how it could."""

import dataclasses
import re

import pytest

from rl.schedule import overlap
from rl.settings import checks

BY_TOKENS = {"groups_per_microbatch": None, "tokens_per_microbatch": 100}


@pytest.mark.parametrize(
  ("fields", "value", "way_out"),
  [
    ({"groups_per_round": 0}, "groups_per_round=0", "at least one"),
    ({"updates_per_round": 0}, "updates_per_round=0", "at least one"),
    ({"groups_per_microbatch": -1}, "groups_per_microbatch=-1", "at least one"),
    # The divisors of 32 end below 6 at 4, and those of 32 / 8 = 4 at 4.
    ({"updates_per_round": 6}, "updates_per_round=6", "use 4"),
    (
      {"updates_per_round": 8, "groups_per_microbatch": 8},
      "groups_per_microbatch=8",
      "the 4 groups of an update; use 4",
    ),
    (
      {"tokens_per_microbatch": 100},
      "tokens_per_microbatch=100 with groups_per_microbatch=8",
      "use groups_per_microbatch=none",
    ),
    (
      {"groups_per_microbatch": None},
      "tokens_per_microbatch=none with groups_per_microbatch=none",
      "set one of them",
    ),
    (BY_TOKENS | {"tokens_per_microbatch": 0}, "tokens_per_microbatch=0", ""),
    (
      BY_TOKENS | {"wait_for_round": True, "updates_per_round": 4},
      "tokens_per_microbatch=100 with wait_for_round=true",
      "use groups_per_microbatch=8 and tokens_per_microbatch=none",
    ),
    ({"max_staleness": -1}, "max_staleness=-1", "0 is synchronous"),
    # Whatever the bound: it would make faults of what is in flight.
    ({"on_publish": "abort"}, "on_publish=abort", "use on_publish=recompute"),
    (
      {"max_staleness": 1, "on_publish": "abort"},
      "on_publish=abort",
      "use on_publish=recompute",
    ),
    # A prefix that all share would be of the first weights for ever.
    ({"on_publish": "keep_kv"}, "on_publish=keep_kv", "use on_publish=drain"),
    # In the order of completion there is no bound but a checked one.
    (
      {"max_staleness": 1, "consume": "ready"},
      "consume=ready",
      "use consume=submit, or drop or recycle",
    ),
    ({"consume": "drop"}, "consume=drop", "use consume=ready or submit"),
    ({"consume": "recycle"}, "consume=recycle", "use consume=ready or submit"),
    (
      {"max_staleness": 1, "wait_for_round": True},
      "wait_for_round=true",
      "use max_staleness=0",
    ),
    (
      {"redundancy": overlap.Redundancy(extra_groups=1)},
      "redundancy.extra_groups=1",
      "use consume=ready",
    ),
    (
      {"redundancy": overlap.Redundancy(extra_members=-1)},
      "redundancy.extra_members=-1",
      "at least 0",
    ),
    (
      {"admission": "hard_frontier"},
      "frontier_groups=0",
      "nothing would be played",
    ),
    (
      {
        "admission": "hard_frontier",
        "frontier_groups": 8,
        "consume": "ready",
      },
      "consume=ready",
      "use consume=submit",
    ),
    ({"too_slow_after": 0}, "too_slow_after=0", "at least 1"),
    ({"frontier_groups": -1}, "frontier_groups=-1", "at least 0"),
  ],
)
def test_a_schedule_that_cannot_run_names_its_value_and_the_way_out(
  fields, value, way_out
):
  with pytest.raises(ValueError, match=re.escape(f"overlap.{value}")) as error:
    checks.validate(overlap.Overlap(**fields))
  assert way_out in str(error.value)


def test_the_default_schedule_can_run():
  overlap.Overlap().validate()


@pytest.mark.parametrize(
  ("max_staleness", "on_publish"),
  [
    (0, "drain"),
    (0, "recompute"),
    (1, "drain"),
    (1, "recompute"),
    (1, "keep_kv"),
  ],
)
def test_what_loses_no_trajectory_and_keeps_the_bound_can_run(
  max_staleness, on_publish
):
  overlap.Overlap(max_staleness=max_staleness, on_publish=on_publish).validate()


@pytest.mark.parametrize(
  ("schedule", "waits", "bound", "on_publish"),
  [
    (overlap.sync(32, updates_per_round=4), True, 0, "drain"),
    (overlap.strict_pipeline(32), False, 0, "drain"),
    (overlap.rollout_pipe(32, updates_per_round=4), False, 0, "drain"),
    (overlap.one_step_off(32), False, 1, "drain"),
    (overlap.bounded(32, 3), False, 3, "drain"),
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
    (overlap.strict_pipeline, {}),
    (overlap.rollout_pipe, {"updates_per_round": 2, "frontier_groups": 5}),
    (overlap.one_step_off, {}),
    (overlap.bounded, {"max_staleness": 3}),
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


def test_by_tokens_the_learner_begins_with_one_group():
  assert overlap.Overlap(**BY_TOKENS).groups_per_batch == 1


def test_one_step_off_is_a_drained_bound_of_one():
  assert overlap.one_step_off(12) == overlap.bounded(12, 1)
  assert overlap.one_step_off(12) == overlap.in_flight(12, on_publish="drain")


@pytest.mark.parametrize("hard", [False, True])
def test_a_frontier_is_that_of_one_update(hard):
  schedule = overlap.rollout_pipe(32, updates_per_round=4, hard=hard)
  schedule.validate()
  assert schedule.frontier_groups == 8
  assert (schedule.admission == "hard_frontier") == hard


@pytest.mark.parametrize(
  ("schedule", "streams", "checks", "drains"),
  [
    (overlap.sync(32), False, False, False),
    (overlap.strict_pipeline(32), True, False, False),
    (overlap.strict_pipeline(32, 32), False, False, False),
    (overlap.Overlap(**BY_TOKENS), True, False, False),
    (overlap.bounded(32, 2), True, False, True),
    (
      dataclasses.replace(overlap.in_flight(32), consume="recycle"),
      True,
      True,
      False,
    ),
  ],
)
def test_what_follows_from_a_schedule(schedule, streams, checks, drains):
  assert schedule.streams == streams
  assert schedule.checks_age == checks
  assert schedule.drains == drains


def test_requests_go_by_group_unless_they_go_as_they_come():
  assert overlap.priority(overlap.sync(4))(3, 1) == (3, 1)
  as_they_come = overlap.Overlap(admission="fifo")
  assert overlap.priority(as_they_come)(3, 1) == ()
