"""The numbers of a round, each worked out from groups made by hand."""

import dataclasses
import math

import numpy as np
import pytest

from rl.algorithms import reward_shaping
from rl.data import trajectory
from rl.loop import round_metrics
from rl.runtime import trace
from rl.train import learner

OK = trajectory.Status.COMPLETED
CUT = trajectory.Status.TRUNCATED
FAULT = trajectory.Status.ENV_FAULT


def _member(status, reward, *versions):
  """Returns an episode with a turn of two tokens for each version."""
  turns = [
    trajectory.Turn(
      context=np.zeros(1, np.int32),
      tokens=np.zeros(2, np.int32),
      logprobs=np.zeros(2, np.float32),
      versions=np.full(2, version, np.int32),
      stop="stop",
    )
    for version in versions
  ]
  return trajectory.Trajectory(
    task_id="game/train/0",
    group_id=0,
    index=0,
    turns=turns,
    status=status,
    reward=reward,
  )


def _group(*members, admitted=0, group_id=0, source="game"):
  members = [
    dataclasses.replace(member, task_id=f"{source}/train/0")
    for member in members
  ]
  return trajectory.Group(
    group_id=group_id,
    trajectories=members,
    admitted=admitted,
  )


def test_a_round_is_counted_over_all_members_of_its_groups():
  groups = [
    _group(_member(OK, 1.0, 3, 4), _member(CUT, 0.0, 3)),
    _group(_member(OK, 0.5, 4), _member(FAULT, None)),
    _group(_member(OK, 0.5, 4), _member(OK, 0.5, 4)),
  ]
  got = round_metrics.of_groups(groups, success=1.0, trained_at=4)
  # Rewards 1, 0, 0.5, 0.5, 0.5, one of which reaches 1; the fault has none.
  assert got["success"] == pytest.approx(1 / 5)
  assert got["reward_mean"] == pytest.approx(0.5)
  # Turns 2, 1, 1, 0, 1, 1 and twice as many tokens.
  assert got["turns_mean"] == 1
  assert got["sampled_tokens"] == 12
  # Trained at version 4: the first group began at 3, the others at 4.
  assert got["staleness_mean"] == pytest.approx(1 / 3)
  assert got["staleness_max"] == 1
  assert got["groups"] == 3
  assert (got["truncated"], got["faults"], got["faults/env_fault"]) == (1, 1, 1)
  assert got["faults/reward_fault"] == got["faults/engine_fault"] == 0


def test_answers_that_a_limit_cut_are_counted_in_episodes_that_are_complete():
  whole = _member(OK, 1.0, 3, 3)
  last = dataclasses.replace(whole.turns[-1], stop="length")
  cut = dataclasses.replace(whole, turns=[whole.turns[0], last])
  got = round_metrics.of_groups([_group(whole, cut)], success=1.0, trained_at=3)
  assert (got["cut_answer_share"], got["truncated_share"]) == (1 / 4, 0)


def test_a_round_without_rewards_has_no_success_rather_than_none():
  groups = [_group(_member(FAULT, None), admitted=2)]
  got = round_metrics.of_groups(groups, success=1.0, trained_at=3)
  assert math.isnan(got["success"])
  assert math.isnan(got["reward_mean"])
  # No token: as old as its admission.
  assert got["staleness_max"] == 1
  assert got["faults"] == 1


def test_what_was_cut_off_on_purpose_is_no_fault():
  stale = _member(trajectory.Status.STALE, None, 3)
  redundant = _member(trajectory.Status.REDUNDANT, None, 3)
  groups = [_group(stale, redundant, _member(FAULT, None))]
  got = round_metrics.of_groups(groups, success=1.0, trained_at=4)
  assert got["faults"] == 1
  assert not {"faults/stale", "faults/redundant"} & set(got)


def test_a_long_success_is_a_success_but_its_reward_is_lower():
  penalty = reward_shaping.Overlong(max_tokens=4, buffer=4)
  # Two of four tokens cost a half, and none costs nothing.
  long = reward_shaping.apply(_member(OK, 1.0, 3), penalty)
  groups = [_group(long, _member(OK, 1.0))]
  got = round_metrics.of_groups(groups, success=1.0, trained_at=4)
  assert (got["success"], got["reward_mean"]) == (1.0, 0.75)


def test_parts_and_metrics_are_means_over_the_episodes_that_have_them():
  first = dataclasses.replace(
    _member(OK, 1.0, 3), parts={"exact": 1.0}, metrics={"errors": 2.0}
  )
  second = dataclasses.replace(
    _member(OK, 0.0, 3), parts={"exact": 0.0, "short": 0.5}
  )
  groups = [_group(first, second)]
  got = round_metrics.of_groups(groups, success=1.0, trained_at=3)
  assert got["reward/exact"] == 0.5
  assert got["reward/short"] == 0.5
  assert got["env/errors"] == 2.0


def test_a_round_of_no_groups_has_no_means():
  got = round_metrics.of_groups([], success=1.0, trained_at=4)
  assert (got["groups"], got["faults"], got["sampled_tokens"]) == (0, 0, 0)
  nan = {name for name, value in got.items() if math.isnan(value)}
  assert nan == {
    "success",
    "reward_mean",
    "turns_mean",
    "truncated_share",
    "cut_answer_share",
    "fault_share",
    "staleness_mean",
    "staleness_max",
  }
  assert round_metrics.of_sources([], [], success=1.0, trained_at=4) == {}
  assert all(map(math.isnan, round_metrics.of_selection([], []).values()))


def _ended(group, kind="ended", length=3, **fields):
  return {"kind": kind, "group": group, "index": 0, "length": length, **fields}


def test_each_source_has_its_scores_and_its_share_of_the_groups():
  groups = [
    _group(_member(OK, 1.0, 3, 4), _member(OK, 0.0, 3), source="slow"),
    _group(_member(OK, 1.0, 4), _member(FAULT, None), group_id=1),
    _group(_member(OK, 0.5, 4), _member(OK, 0.0, 4), group_id=2),
    _group(_member(OK, 0.0, 4), _member(OK, 0.0), group_id=3),
  ]
  got = round_metrics.of_sources(groups, [], success=1.0, trained_at=4)
  assert (got["source/slow/groups"], got["source/slow/share"]) == (1, 0.25)
  assert (got["source/game/groups"], got["source/game/share"]) == (3, 0.75)
  assert got["source/slow/success"] == got["source/slow/reward_mean"] == 0.5
  # Rewards 1, 0.5, 0, 0, 0.
  assert got["source/game/success"] == pytest.approx(0.2)
  assert got["source/game/reward_mean"] == pytest.approx(0.3)
  # A turn has one id of context and two sampled: 6 and 3 ids, 4 and 2 sampled.
  assert got["source/slow/length_mean"] == 4.5
  assert got["source/slow/sampled_mean"] == 3
  assert got["source/slow/staleness_mean"] == 1
  assert got["source/game/staleness_mean"] == 0


def test_faults_and_aborts_are_shares_of_the_episodes_of_their_source():
  slots = {1: "slow", 2: "game"}
  news = [
    {"kind": "submitted", "group": 3, "source": "slow"},
    _ended(1),
    _ended(1, "aborted"),
    _ended(3, "aborted"),
    _ended(3),
    {"kind": "fault", "group": 3, "index": 1},
    {"kind": "dropped", "group": 3, "reason": "stale"},
    _ended(2),
    # Nobody knows who plays slot 9; and this event is of no slot.
    _ended(9, "aborted"),
    {"kind": "published", "version": 4},
  ]
  got = round_metrics.of_sources(
    [], news, success=1.0, trained_at=4, slots=slots
  )
  assert got["source/slow/episodes"] == 4
  assert (got["source/slow/faults"], got["source/slow/fault_rate"]) == (1, 0.25)
  assert (got["source/slow/aborted"], got["source/slow/abort_rate"]) == (2, 0.5)
  assert got["source/slow/dropped"] == 1
  assert (got["source/game/episodes"], got["source/game/abort_rate"]) == (1, 0)
  assert math.isnan(got["source/slow/share"])
  assert math.isnan(got["source/slow/reward_mean"])


def test_slots_are_known_from_submission_to_the_round_after_their_end():
  slots = round_metrics.SlotSources()
  first = [
    {"kind": "submitted", "group": i, "source": name}
    for i, name in enumerate(["a", "b", "a", "b"])
  ]
  assert slots.follow(first) == {0: "a", 1: "b", 2: "a", 3: "b"}
  ends = [
    {"kind": "trained", "group": 0},
    {"kind": "dropped", "group": 1, "reason": "redundant"},
    # This one is played again.
    {"kind": "dropped", "group": 2, "reason": "stale"},
  ]
  assert slots.follow(ends) == {0: "a", 1: "b", 2: "a", 3: "b"}
  assert slots.follow([]) == {2: "a", 3: "b"}


def test_selection_compares_what_is_trained_with_what_was_launched():
  groups = [_group(_member(OK, 1.0, 3), _member(FAULT, None, 3, 3, 3))]
  news = [_ended(0, length=3), _ended(0, "aborted", 9), _ended(1, length=12)]
  got = round_metrics.of_selection(groups, news)
  # Three ids of the one that could be trained; 24 / 3 launched.
  assert got == {
    "length_trained_mean": 3,
    "length_launched_mean": 8,
    "length_trained_share": 0.375,
  }


def test_micro_batches_are_counted_with_the_ids_that_they_hold():
  taken = [
    {"kind": "dequeued", "microbatch": number, "length": length}
    for number, length in ((0, 10), (1, 20), (1, 40))
  ]
  assert round_metrics.of_microbatches([*taken, {"kind": "update"}]) == {
    "microbatches": 2,
    "microbatch_ids_mean": 35,
    "microbatch_ids_max": 60,
  }


def test_every_sum_of_the_learner_has_a_metric():
  names = [*learner.METRICS, "router_entropy", "dropped", "load/0"]
  sums = {name: float(i) for i, name in enumerate(names)}
  got = round_metrics.of_updates([sums])
  assert sorted(got.values()) == sorted(sums.values())
  assert got["trained_tokens"] == sums["tokens"]
  assert got["clip_fraction"] == sums["clipped"]
  assert got["dropped_assignments"] == sums["dropped"]


def test_updates_of_a_round_are_averaged_and_their_tokens_added():
  one = dict.fromkeys(learner.METRICS, 1.0) | {"tokens": 30.0, "max_load": 3.0}
  two = dict.fromkeys(learner.METRICS, 2.0) | {"tokens": 10.0}
  got = round_metrics.of_updates([one, two])
  assert (got["loss"], got["trained_tokens"]) == (1.5, 40.0)
  # An update that trained nothing says nothing about the router.
  assert got["max_load"] == 3.0
  assert "dropped_assignments" not in got


def test_speed_counts_the_tokens_of_episodes_that_ended_or_were_cut_off():
  # 6 + 4 tokens played and 8 trained in 2 s.
  log = [
    {"kind": "ended", "tokens": 6},
    {"kind": "turn", "tokens": 100},
    {"kind": "aborted", "tokens": 4},
  ]
  got = round_metrics.of_speed(log, [{"tokens": 8.0}], wall_s=2.0)
  assert (got["decode_tokens_per_s"], got["learner_tokens_per_s"]) == (5, 4)


def test_busy_shares_are_of_the_wall_time_and_overlap_of_the_shorter():
  # Of 10 s the learner works 2 and decode 8; 1 s of both is the same second,
  # half of the learner's 2.
  spans = [
    trace.Span("learner", "update", 0.0, 2.0),
    trace.Span("decode", "step", 1.0, 9.0),
  ]
  got = round_metrics.of_spans(trace.overlap(spans), wall_s=10.0)
  assert got == {
    "learner_busy": 0.2,
    "decode_busy": 0.8,
    "overlap_share": 0.5,
  }
