"""Tests of the records of a rollout and their JSON."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from envs import base
from rl.data import trajectory


def _turn(context, tokens, versions, experts=None):
  return trajectory.Turn(
    context=np.asarray(context, np.int32),
    tokens=np.asarray(tokens, np.int32),
    logprobs=np.linspace(-1 / 7, -22 / 7, len(tokens), dtype=np.float32),
    versions=np.asarray(versions, np.int32),
    stop="stop",
    decode_s=0.25,
    queue_s=0.125,
    experts=None if experts is None else np.asarray(experts, np.int32),
  )


def _trajectory(*turns, index=0, **fields):
  fields = {"status": trajectory.Status.COMPLETED, "reward": 0.1} | fields
  return trajectory.Trajectory(
    task_id="game/train/3", group_id=7, index=index, turns=turns, **fields
  )


def _group(*members):
  return trajectory.Group(group_id=7, trajectories=members, admitted=4)


def test_ids_are_context_and_answer_of_each_turn_in_order():
  episode = _trajectory(
    _turn([1, 2], [3], [0]), _turn([4], [], []), _turn([], [5, 6], [0, 1])
  )
  assert episode.ids.tolist() == [1, 2, 3, 4, 5, 6]
  assert episode.sampled.tolist() == [False, False, True, False, True, True]
  assert episode.num_sampled == 3


def test_an_episode_that_never_started_is_empty():
  episode = _trajectory(status=trajectory.Status.ENV_FAULT, reward=None)
  assert (len(episode.ids), len(episode.sampled)) == (0, 0)
  assert episode.num_sampled == 0
  assert episode.first_version is None


def test_first_version_is_that_of_the_first_token_and_skips_empty_answers():
  episode = _trajectory(_turn([1], [], []), _turn([2], [3, 4], [5, 6]))
  assert episode.first_version == 5


def test_a_group_is_as_old_as_the_oldest_first_token_of_its_members():
  group = _group(
    _trajectory(_turn([1], [2, 3], [6, 7])),
    _trajectory(_turn([1], [2], [5]), index=1),
    _trajectory(index=2),
  )
  assert group.first_version == 5
  assert group.num_sampled == 3


def test_tokens_of_redundant_members_are_those_of_the_group_too():
  group = _group(_trajectory(_turn([1], [2, 3], [6, 7])))
  more = dataclasses.replace(group, redundant_tokens=5)
  assert (group.num_sampled, more.num_sampled) == (2, 7)


def test_versions_are_run_lengths_across_turns():
  episode = _trajectory(
    _turn([1], [2, 3], [4, 4]),
    _turn([1], [], []),
    _turn([1], [2, 3, 5], [4, 5, 7]),
    _turn([1], [2], [7]),
  )
  assert episode.versions == [(4, 3), (5, 1), (7, 2)]
  assert _trajectory().versions == []


def test_a_group_without_tokens_is_as_old_as_its_admission():
  assert _group(_trajectory(), _trajectory(index=1)).first_version == 4


@pytest.mark.parametrize("status", trajectory.Status)
def test_only_an_episode_without_a_fault_can_be_trained(status):
  whole = (trajectory.Status.COMPLETED, trajectory.Status.TRUNCATED)
  assert status.trainable == (status in whole)


def test_experts_of_a_trajectory_are_unknown_where_a_turn_has_none():
  # One sparse layer, two experts a token: -1 for the second turn of two ids.
  episode = _trajectory(
    _turn([1], [2], [0], [[[0, 3]], [[-1, -1]]]),
    _turn([3], [4], [0]),
    _turn([], [5], [0], [[[2, 1]]]),
  )
  experts: Any = episode.experts
  assert experts[:, 0].tolist() == [
    [0, 3],
    [-1, -1],
    [-1, -1],
    [-1, -1],
    [2, 1],
  ]
  assert _trajectory(_turn([1], [2], [0])).experts is None
  assert _trajectory().experts is None


def test_experts_that_do_not_fit_their_turn_are_refused():
  with pytest.raises(ValueError, match=r"shape \(1, 1, 2\) .* use \(2, layers"):
    _turn([1], [2], [0], [[[0, 3]]])
  with pytest.raises(ValueError, match="known in part; use -1 for all"):
    _turn([1], [2], [0], [[[0, 3]], [[-1, 2]]])
  of_two_models = _trajectory(
    _turn([], [2], [0], [[[0, 3]]]), _turn([], [2], [0], [[[0]]])
  )
  with pytest.raises(ValueError, match="must come from one model"):
    _ = of_two_models.experts


@pytest.mark.parametrize("dtype", [np.int8, np.int16])
@pytest.mark.parametrize("shape", [(3, 2, 2), (0, 2, 2), (3, 0, 2)])
def test_json_keeps_the_experts_of_a_turn_unless_there_are_none(shape, dtype):
  count, experts = shape[0], np.arange(np.prod(shape)).reshape(shape)
  turn = _turn([1] * count, [], [], experts)
  turn = dataclasses.replace(turn, experts=experts.astype(dtype))
  episode = _trajectory(turn)
  text = json.dumps(trajectory.trajectory_to_json(episode))
  again: Any = (
    trajectory.trajectory_from_json(json.loads(text)).turns[0].experts
  )
  if experts.size:
    assert again.dtype == dtype
    assert again.tolist() == experts.tolist()
  else:
    assert again is None


def test_experts_written_without_a_dtype_are_read_as_before():
  turn = _turn([1, 2], [], [], [[[300, 7]], [[-1, -1]]])
  data = trajectory.trajectory_to_json(_trajectory(turn))
  del data["turns"][0]["expert_dtype"]
  again: Any = trajectory.trajectory_from_json(data).turns[0].experts
  assert again.dtype == np.int32
  assert again.tolist() == [[[300, 7]], [[-1, -1]]]


def test_turns_written_before_experts_were_kept_can_be_read():
  data = trajectory.trajectory_to_json(_trajectory(_turn([1], [2], [0])))
  del data["turns"][0]["experts"]
  assert trajectory.trajectory_from_json(data).turns[0].experts is None


def test_json_keeps_every_bit_of_a_group():
  group = _group(
    _trajectory(
      _turn([1, 2], [3, 4, 5], [0, 0, 1]),
      _turn([6], [], []),
      parts={"outcome": 0.1},
    ),
    _trajectory(
      index=1,
      status=trajectory.Status.REWARD_FAULT,
      reward=None,
      fault="reward took over 30 s",
    ),
    _trajectory(
      index=2,
      status=trajectory.Status.TRUNCATED,
      unanswered=np.array([6, 7], np.int32),
    ),
  )
  task = base.Task("game/train/3", 3, "train", 11, answer="42")
  group = dataclasses.replace(
    group, task=task, attempt=2, refills=1, redundant_tokens=9
  )
  data = trajectory.group_to_json(group)
  again = trajectory.group_from_json(json.loads(json.dumps(data)))
  assert trajectory.group_to_json(again) == data
  assert (again.group_id, again.admitted) == (7, 4)
  assert (again.task, again.attempt, again.redundant_tokens) == (task, 2, 9)
  for old, new in zip(
    group.trajectories[0].turns, again.trajectories[0].turns, strict=True
  ):
    for name in ("context", "tokens", "logprobs", "versions"):
      before, after = getattr(old, name), getattr(new, name)
      assert before.dtype == after.dtype
      assert before.tobytes() == after.tobytes()
  faulted = again.trajectories[1]
  assert faulted.status is trajectory.Status.REWARD_FAULT
  assert faulted.reward is None
  assert again.trajectories[2].unanswered.tolist() == [6, 7]


def test_a_task_saved_before_tasks_had_answers_is_read():
  data = trajectory.group_to_json(trajectory.Group(0, [], 0))
  del data["task"]["answer"]
  assert trajectory.group_from_json(data).task == trajectory.NO_TASK
