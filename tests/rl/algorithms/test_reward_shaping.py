"""The penalty for length against published values."""

import dataclasses

import numpy as np
import pytest

from rl.algorithms import reward_shaping
from rl.data import trajectory

OK = trajectory.Status.COMPLETED


def _episode(
  num_tokens, reward: float | None = 1.0, status=OK, turns=1, **parts
):
  """Returns an episode of so many sampled tokens, over some turns."""
  pieces = np.array_split(np.zeros(num_tokens, np.int32), turns)
  return trajectory.Trajectory(
    task_id="game/train/0",
    group_id=0,
    index=0,
    turns=[
      trajectory.Turn(
        # Context is not the policy's and does not count.
        context=np.zeros(1000, np.int32),
        tokens=tokens,
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.zeros(len(tokens), np.int32),
        stop="stop",
      )
      for tokens in pieces
    ],
    status=status,
    reward=reward,
    parts=parts,
  )


@pytest.mark.parametrize(
  ("num_tokens", "max_tokens", "buffer", "expected"),
  [
    # TRL, the docstring of its soft overlong punishment.
    (90, 100, 20, -0.5),
    # DAPO's lengths, arXiv 2503.14476: (20480 - 4096 - 18000) / 4096.
    (18000, 20480, 4096, -0.39453125),
    (80, 100, 20, 0.0),
    (81, 100, 20, -0.05),
    (100, 100, 20, -1.0),
    (250, 100, 20, -1.0),
    (0, 100, 100, 0.0),
    (25, 100, 100, -0.25),
  ],
)
def test_the_penalty_has_the_published_values(
  num_tokens, max_tokens, buffer, expected
):
  penalty = reward_shaping.Overlong(max_tokens=max_tokens, buffer=buffer)
  assert penalty(_episode(num_tokens)) == pytest.approx(expected, abs=1e-12)


def test_tokens_of_all_turns_count_and_the_penalty_scales():
  penalty = reward_shaping.Overlong(max_tokens=100, buffer=20, penalty=0.5)
  assert penalty(_episode(90, turns=4)) == pytest.approx(-0.25)


def test_the_penalty_is_in_the_reward_and_a_part_of_its_own():
  penalty = reward_shaping.Overlong(max_tokens=100, buffer=20)
  got = reward_shaping.apply(_episode(90, 1.0, outcome=1.0), penalty)
  assert got.reward == 0.5
  assert (got.parts["outcome"], got.parts["overlong"]) == (1.0, -0.5)


def test_the_reward_before_shaping_is_kept_exactly():
  penalty = reward_shaping.Overlong(max_tokens=20480, buffer=4096, penalty=0.3)
  episode = _episode(18000, 0.1)
  assert episode.graded_reward == 0.1
  assert reward_shaping.apply(episode, penalty).graded_reward == 0.1


def test_shaping_twice_is_shaping_once():
  penalty = reward_shaping.Overlong(max_tokens=100, buffer=20)
  once = reward_shaping.apply(_episode(95), penalty)
  twice = reward_shaping.apply(once, penalty)
  assert (twice.reward, twice.parts) == (once.reward, once.parts)


def test_a_short_episode_keeps_its_reward():
  penalty = reward_shaping.Overlong(max_tokens=100, buffer=20)
  got = reward_shaping.apply(_episode(10, 0.7), penalty)
  assert (got.reward, got.parts["overlong"]) == (0.7, 0.0)


def test_a_fault_gets_no_reward_by_being_long():
  penalty = reward_shaping.Overlong(max_tokens=100, buffer=20)
  fault = _episode(200, None, trajectory.Status.ENV_FAULT)
  assert reward_shaping.apply(fault, penalty) is fault
  assert fault.graded_reward is None


def _says(*answers):
  """Returns an episode whose turns sampled these tokens."""
  episode = _episode(sum(map(len, answers)), turns=len(answers))
  turns = [
    dataclasses.replace(turn, tokens=np.array(answer, np.int32))
    for turn, answer in zip(episode.turns, answers, strict=True)
  ]
  return dataclasses.replace(episode, turns=turns)


@pytest.mark.parametrize(
  ("answers", "size", "expected"),
  [
    # TRL, trl/rewards: 4 bigrams of one kind, 1 - 1 / 4.
    ([[5, 5, 5, 5, 5]], 2, -0.75),
    ([[1, 2, 3, 4]], 2, 0.0),
    # 1 2, 2 1, 1 2: one of three was there before.
    ([[1, 2, 1, 2]], 2, -1 / 3),
    ([[1, 2, 1, 2]], 3, 0.0),
    # What two answers have in common, or would have across them, is fine.
    ([[1, 2], [1, 2], [1, 2]], 2, 0.0),
    ([[1, 1, 1], [2, 3]], 2, -1 / 3),
    ([[1]], 2, 0.0),
    ([[]], 1, 0.0),
  ],
)
def test_repetition_is_the_share_of_n_grams_said_before(
  answers, size, expected
):
  got = reward_shaping.Repetition(size=size)(_says(*answers))
  assert got == pytest.approx(expected)


def test_both_penalties_are_taken_and_told_apart():
  episode = _says([5] * 90)
  length = reward_shaping.Overlong(max_tokens=100, buffer=20)
  got = reward_shaping.apply(
    episode, length, None, reward_shaping.Repetition(penalty=0.5)
  )
  # 89 bigrams of one kind.
  again = -0.5 * 88 / 89
  assert got.parts["repetition"] == pytest.approx(again)
  assert got.reward == pytest.approx(1.0 - 0.5 + again)
  assert got.graded_reward == 1.0
  assert reward_shaping.apply(episode, None) is episode


@pytest.mark.parametrize("bad", [{"size": 0}, {"penalty": float("inf")}])
def test_a_repetition_with_nonsense_is_refused(bad):
  with pytest.raises(ValueError, match=r"^repetition\.(size|penalty)="):
    reward_shaping.Repetition(**bad).validate()


@pytest.mark.parametrize(
  "bad",
  [
    {"max_tokens": 100, "buffer": 0},
    {"max_tokens": 100, "buffer": 101},
    {"max_tokens": 100, "buffer": 20, "penalty": 0.0},
    {"max_tokens": 100, "buffer": 20, "penalty": float("nan")},
  ],
)
def test_a_penalty_with_nonsense_is_refused(bad):
  with pytest.raises(ValueError, match=r"^overlong\.(buffer|penalty)="):
    reward_shaping.Overlong(**bad).validate()
  reward_shaping.Overlong(max_tokens=100, buffer=100).validate()
