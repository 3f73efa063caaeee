"""The penalty for length against published values."""

import numpy as np
import pytest

from rl import shaping, trajectory

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
    (90, 100, 20, -0.5),
    # (20480 - 4096 - 18000) / 4096.
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
  penalty = shaping.Overlong(max_tokens=max_tokens, buffer=buffer)
  assert penalty(_episode(num_tokens)) == pytest.approx(expected, abs=1e-12)


def test_tokens_of_all_turns_count_and_the_penalty_scales():
  penalty = shaping.Overlong(max_tokens=100, buffer=20, penalty=0.5)
  assert penalty(_episode(90, turns=4)) == pytest.approx(-0.25)


def test_the_penalty_is_in_the_reward_and_a_part_of_its_own():
  penalty = shaping.Overlong(max_tokens=100, buffer=20)
  got = shaping.apply(_episode(90, 1.0, outcome=1.0), penalty)
  assert got.reward == 0.5
  assert (got.parts["outcome"], got.parts["overlong"]) == (1.0, -0.5)


def test_the_reward_before_shaping_is_kept_exactly():
  penalty = shaping.Overlong(max_tokens=20480, buffer=4096, penalty=0.3)
  episode = _episode(18000, 0.1)
  assert shaping.unshaped(episode) == 0.1
  assert shaping.unshaped(shaping.apply(episode, penalty)) == 0.1


def test_shaping_twice_is_shaping_once():
  penalty = shaping.Overlong(max_tokens=100, buffer=20)
  once = shaping.apply(_episode(95), penalty)
  twice = shaping.apply(once, penalty)
  assert (twice.reward, twice.parts) == (once.reward, once.parts)


def test_a_short_episode_keeps_its_reward():
  penalty = shaping.Overlong(max_tokens=100, buffer=20)
  got = shaping.apply(_episode(10, 0.7), penalty)
  assert (got.reward, got.parts["overlong"]) == (0.7, 0.0)


def test_a_fault_gets_no_reward_by_being_long():
  penalty = shaping.Overlong(max_tokens=100, buffer=20)
  fault = _episode(200, None, trajectory.Status.ENV_FAULT)
  assert shaping.apply(fault, penalty) is fault
  assert shaping.unshaped(fault) is None


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
  with pytest.raises(ValueError, match="Overlong: "):
    shaping.Overlong(**bad).validate()
  shaping.Overlong(max_tokens=100, buffer=100).validate()
