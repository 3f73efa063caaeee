"""The difficulty filter: what is skipped, for how long, and what is kept."""

import itertools
import json

import pytest

from envs import base
from rl.rollout import curriculum


def _task(name):
  return base.Task(f"game/train/{name}", 0, "train", 0)


def _made(**settings):
  return curriculum.Curriculum(curriculum.PassRate(**settings))


def _choose(filter_, names):
  """Returns the letter that is taken, and how many were drawn for it."""
  drawn = []

  def draw():
    drawn.append(next(names))
    return _task(drawn[-1])

  return filter_.choose(draw).id[-1], len(drawn)


def _play(filter_, name, *rewards):
  filter_.learned(_task(name).id, rewards)


def test_the_pass_rate_is_of_the_last_groups_and_of_graded_members():
  made = _made(window=2, success=1.0)
  _play(made, "a", 0.0, 0.0, 0.0)
  _play(made, "a", 1.0, None, 0.5)
  # 0 of 3 and 1 of 2: the faulty member is in neither count.
  assert made.rate(_task("a").id) == pytest.approx(1 / 5)
  _play(made, "a", 1.0, 2.0)
  # The first group is no longer recent: 1 of 2 and 2 of 2.
  assert made.rate(_task("a").id) == pytest.approx(3 / 4)
  _play(made, "a", None, None)
  assert made.rate(_task("a").id) == pytest.approx(3 / 4)


def test_too_easy_and_too_hard_tasks_are_skipped_and_unknown_ones_taken():
  made = _made(low=0.25, high=0.75)
  _play(made, "a", 1.0, 1.0)
  _play(made, "b", 0.0, 0.0)
  _play(made, "c", 1.0, 0.0, 0.0, 0.0)
  assert _choose(made, iter("abc")) == ("c", 3)
  assert _choose(made, iter("abd")) == ("d", 3)


def test_a_skipped_task_is_played_again_every_revisit_th_time():
  made = _made(revisit=3)
  _play(made, "a", 0.0, 0.0)
  drawn = [_choose(made, itertools.chain("a", "z"))[0] for _ in range(7)]
  # Its third and its sixth draw.
  assert "".join(drawn) == "zzazzaz"


def test_a_task_comes_back_when_it_has_become_possible():
  made = _made(window=1, revisit=2)
  _play(made, "a", 0.0, 0.0)
  assert _choose(made, iter("az"))[0] == "z"
  assert _choose(made, iter("az"))[0] == "a"
  _play(made, "a", 1.0, 0.0)
  assert [_choose(made, iter("az"))[0] for _ in range(3)] == ["a"] * 3


def test_draws_end_when_nothing_is_worth_playing():
  made = _made(max_skips=5, revisit=1000)
  _play(made, "a", 1.0)
  # Five skipped, and the sixth taken as it is.
  assert _choose(made, itertools.repeat("a")) == ("a", 6)


def test_memory_is_bounded_and_the_oldest_play_is_forgotten():
  made = _made(max_tasks=2, revisit=2)
  for name in "aba":
    _play(made, name, 0.0)
  assert _choose(made, iter("bz"))[0] == "z"
  _play(made, "c", 0.0)
  assert list(made.state["plays"]) == [_task("a").id, _task("c").id]
  assert made.state["skipped"] == {}
  assert made.rate(_task("b").id) is None


def test_a_restored_curriculum_decides_as_the_saved_one():
  made = _made(revisit=3, max_tasks=3)
  for name in "abc":
    _play(made, name, 0.0)
  _choose(made, iter("aaz"))
  # As a checkpoint keeps it.
  saved = json.loads(json.dumps(made.state))
  again = _made(revisit=3, max_tasks=3)
  again.restore(saved)
  for filter_ in (made, again):
    _play(filter_, "d", 1.0)
  assert again.state == made.state
  assert _choose(again, iter("az")) == _choose(made, iter("az")) == ("a", 1)


def test_a_saved_state_does_not_change_with_the_curriculum():
  made = _made()
  saved = made.state
  _play(made, "a", 0.0)
  assert saved == {"plays": {}, "skipped": {}}


@pytest.mark.parametrize(
  "bad",
  [
    {"low": 0.6, "high": 0.4},
    {"low": -0.1},
    {"high": 1.5},
    {"low": float("nan")},
    {"window": 0},
    {"revisit": 1},
    {"max_skips": 0},
    {"max_tasks": 0},
    {"success": float("nan")},
  ],
)
def test_settings_that_filter_nothing_are_refused(bad):
  with pytest.raises(ValueError, match=f"pass_rate.*{next(iter(bad))}="):
    curriculum.PassRate(**bad).validate()


def test_the_defaults_are_valid():
  curriculum.PassRate().validate()
  assert _made().rate("game/train/0") is None
