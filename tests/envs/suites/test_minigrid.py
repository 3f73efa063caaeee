import asyncio
import pickle
import sys

import pytest

from envs import base
from envs.suites import minigrid

SOURCE = minigrid.MiniGrid()
DOOR = minigrid.MiniGrid(level="MiniGrid-DoorKey-5x5-v0")
TASKS = [SOURCE.task(i, "train") for i in range(12)]


def explorer(source):
  return lambda task, messages: source.explore(
    task, messages, 100 * task.seed + len(messages)
  )


def test_the_bot_of_babyai_accomplishes_its_missions(play_all):
  for transcript in play_all(SOURCE, TASKS, SOURCE.oracle):
    assert transcript.step_rewards[-1] == 1.0
    assert sum(transcript.step_rewards) == 1.0


def test_the_bot_goes_on_from_wherever_others_went(play_all):
  lost = explorer(SOURCE)

  def agent(task, messages):
    return (lost if len(messages) < 6 else SOURCE.oracle)(task, messages)

  for transcript in play_all(SOURCE, TASKS, agent):
    assert sum(transcript.step_rewards) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
  "level",
  [
    "BabyAI-GoToLocal-v0",
    "MiniGrid-DoorKey-5x5-v0",
    "MiniGrid-Dynamic-Obstacles-5x5-v0",
  ],
)
def test_a_level_passes_all_checks_of_a_trial(faults_of, level):
  source = minigrid.MiniGrid(level=level, turns=20)
  assert not faults_of(source, explorer(source))


def test_what_is_carried_is_said_and_no_longer_seen(play):
  # A task whose key lies right ahead.
  task = next(
    t
    for t in (DOOR.task(i, "train") for i in range(60))
    if "a yellow key 1 ahead," in beginning(DOOR, t)
  )
  said = iter(["pickup", "drop", "jump", *["done"] * 61])
  texts = [
    m.content
    for m in play(DOOR, task, lambda *_: next(said)).messages
    if m.role == "user"
  ]
  assert "a locked yellow door" in texts[0]
  assert "yellow key" not in texts[1].partition("You carry")[0]
  assert texts[1].endswith("You carry a yellow key.")
  assert texts[2].endswith("You carry nothing.")
  assert texts[3].startswith("The answer must be one of left, right, forward")


def beginning(source, task):
  return asyncio.run(source(task).start())[0].content


def test_places_are_those_of_the_agents_view():
  # The agent stands in the middle of the last row and looks to the first:
  # column 1 is two to the left of column 3, row 4 is two ahead of row 6.
  import numpy as np

  image = np.zeros((7, 7, 3), np.uint8)
  image[1, 4] = (6, 0, 0)  # a red ball
  image[3, 5] = (4, 2, 2)  # a locked blue door
  image[5, 6] = (2, 5, 0)  # a wall, and one behind it
  image[6, 6] = (2, 5, 0)
  image[6, 0] = (8, 1, 0)  # the goal
  assert list(minigrid._seen(image)) == [
    "a locked blue door 1 ahead",
    "a wall 2 right",
    "a red ball 2 ahead and 2 left",
    "a goal 6 ahead and 3 right",
  ]


@pytest.mark.parametrize("text", ["", "go forward", "7", "²", "x" * 9_999])
def test_anything_but_an_action_costs_a_turn_and_earns_nothing(play, text):
  source = minigrid.MiniGrid(turns=3)
  transcript = play(source, source.task(0, "train"), lambda *_: text)
  assert transcript.step_rewards == [0.0] * 3


def test_an_episode_changes_no_other_of_its_task(play_all):
  task = TASKS[0]
  alone = play_all(SOURCE, [task], explorer(SOURCE))
  assert play_all(SOURCE, [task] * 8, explorer(SOURCE)) == alone * 8


def test_no_grid_of_evaluation_is_one_of_training():
  source = minigrid.MiniGrid(level="BabyAI-GoToRedBallNoDists-v0")
  begin = {
    split: {source._beginning(source.task(i, split).seed) for i in range(100)}
    for split in ("train", "eval")
  }
  assert not begin["train"] & begin["eval"]


def test_nothing_is_printed_on_the_way(capfd):
  # BossLevel throws away missions, and prints why.
  for seed in range(12):
    minigrid._made("BabyAI-BossLevel-v0", seed)
  assert capfd.readouterr().out == ""


def test_a_level_without_a_mission_of_babyai_has_no_oracle():
  with pytest.raises(ValueError, match="only levels of BabyAI"):
    DOOR.oracle(DOOR.task(0, "train"), [base.Message("user", "x")])


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"level": "BabyAI-GoToLocl-v0"}, "must be one of BabyAI-GoToLocal-v0"),
    ({"level": "MiniGrid-Playground-v0"}, "level=MiniGrid-Playground-v0"),
    ({"turns": 0}, "turns=0"),
  ],
)
def test_settings_that_cannot_work_are_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    minigrid.MiniGrid(**fields)


def test_a_level_with_one_grid_alone_has_no_evaluation():
  empty = minigrid.MiniGrid(level="MiniGrid-Empty-5x5-v0")
  with pytest.raises(ValueError, match="tasks of MiniGrid-Empty-5x5-v0"):
    [empty.task(0, split) for split in ("train", "eval")]


def test_a_run_without_the_package_is_told_which_extra_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, "minigrid", None)
  minigrid._package.cache_clear()
  with pytest.raises(ValueError, match=r"pip install 'twinmesh\[minigrid\]'"):
    minigrid.MiniGrid()


def test_a_source_is_a_setting():
  assert pickle.loads(pickle.dumps(SOURCE)) == SOURCE
