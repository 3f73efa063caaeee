import pickle

import pytest

from envs import base, gymnasium

SOURCE = gymnasium.FrozenLake()
TASKS = [SOURCE.task(i, "train") for i in range(100)]


def explorer(task, messages):
  return SOURCE.explore(task, messages, 100 * task.seed + len(messages))


def script(*answers: str):
  """Returns an agent that repeats its answers in turn, whatever it sees."""
  return lambda task, messages: answers[len(messages) // 2 % len(answers)]


def replies(transcript: base.Transcript) -> list[str]:
  return [m.content for m in transcript.messages if m.role == "user"]


@pytest.mark.parametrize("size", [2, 4, 6])
def test_the_oracle_always_reaches_the_goal(play_all, size):
  # 30 turns suffice for all shortest paths of these 6 x 6 maps.
  source = gymnasium.FrozenLake(size=size, turns=30)
  tasks = [source.task(i, s) for i in range(60) for s in ("train", "eval")]
  for transcript in play_all(source, tasks, source.oracle):
    assert replies(transcript)[-1] == "goal"
    assert sum(transcript.step_rewards) == 1.0


def test_the_default_turns_are_enough_for_every_task_tried(play_all):
  played = play_all(SOURCE, TASKS, SOURCE.oracle)
  assert all(t.step_rewards[-1] == 1.0 for t in played)


def test_the_map_comes_once_and_then_only_positions(play):
  transcript = play(SOURCE, TASKS[0], SOURCE.oracle)
  first, *moves, end = replies(transcript)
  cells = "".join(SOURCE.map(TASKS[0].seed)).lower()
  assert first == f"{' '.join(cells)} r0 c0"
  assert all(len(move.split()) == 2 for move in moves)
  assert end == "goal"


def test_a_wall_keeps_the_walker_in_place(play):
  transcript = play(SOURCE, TASKS[0], script("left", "up"))
  assert set(replies(transcript)[1:-1]) == {"r0 c0"}
  assert replies(transcript)[-1] == "lost"


def test_a_hole_ends_the_walk_without_reward(play_all):
  # A map with a hole below the start.
  task = next(t for t in TASKS if SOURCE.map(t.seed)[1][0] == "H")
  (transcript,) = play_all(SOURCE, [task], script("down"))
  assert replies(transcript)[1:] == ["hole"]
  assert transcript.step_rewards == [0.0]


@pytest.mark.parametrize(
  "text", ["", "Left", "0", "left left", "²", "x" * 9999]
)
def test_anything_but_a_direction_is_invalid_and_costs_a_turn(play, text):
  transcript = play(SOURCE, TASKS[0], script(text))
  assert replies(transcript)[1:] == ["invalid r0 c0"] * 9 + ["lost"]
  assert transcript.step_rewards == [0.0] * 10


def test_the_goal_on_the_last_turn_counts(play):
  # Without holes the goal of a 4 x 4 map is 3 + 3 = 6 moves away.
  source = gymnasium.FrozenLake(turns=6)
  task = next(t for t in TASKS if not any("H" in r for r in SOURCE.map(t.seed)))
  transcript = play(source, task, source.oracle)
  assert transcript.step_rewards == [0.0] * 5 + [1.0]
  assert replies(transcript)[-1] == "goal"


def test_every_word_that_is_said_is_declared(play_all):
  agents = [SOURCE.oracle, explorer, script("up", "swim")]
  played = [t for a in agents for t in play_all(SOURCE, TASKS, a)]
  said = {w for t in played for m in t.messages for w in m.content.split()}
  assert said - {"swim"} == set(SOURCE.words)
  # 4 cells, 4 + 4 places, 4 directions, 4 outcomes
  assert len(SOURCE.words) == len(set(SOURCE.words)) == 20


def test_no_map_of_evaluation_is_a_map_of_training():
  maps = {
    split: {tuple(SOURCE.map(SOURCE.task(i, split).seed)) for i in range(1000)}
    for split in ("train", "eval")
  }
  assert not maps["train"] & maps["eval"]
  assert min(len(m) for m in maps.values()) > 100


def test_tasks_repeat(play_all):
  assert [SOURCE.task(i, "train") for i in range(100)] == TASKS
  assert TASKS[17].id == "frozen_lake/train/17"


@pytest.mark.parametrize("slippery", [False, True])
def test_a_task_gives_one_walk_even_among_threads(play_all, slippery):
  source = gymnasium.FrozenLake(slippery=slippery, turns=50)
  tasks = [TASKS[i] for i in (0, 1, 2, 3) for _ in range(50)]
  played = play_all(source, tasks, source.oracle)
  walks = {
    (t.id, tuple(replies(p))) for t, p in zip(tasks, played, strict=True)
  }
  assert len(walks) == 4


def test_explorers_never_give_an_invalid_answer(play_all):
  played = play_all(SOURCE, TASKS, explorer)
  assert not any("invalid" in m for t in played for m in replies(t))


def test_256_walks_at_the_same_time_all_end(play_all):
  tasks = [SOURCE.task(i, "train") for i in range(256)]
  assert len(play_all(SOURCE, tasks, SOURCE.oracle)) == 256


def test_a_source_is_a_setting():
  other = pickle.loads(pickle.dumps(SOURCE))
  assert other == SOURCE
  assert hash(other) == hash(SOURCE)


@pytest.mark.parametrize(
  "fields",
  [
    {"size": 1},
    {"turns": 0},
    {"frozen_probability": 0.2},
    {"frozen_probability": 1.0},
  ],
)
def test_settings_that_cannot_work_are_refused(fields):
  with pytest.raises(ValueError, match=next(iter(fields))):
    gymnasium.FrozenLake(**fields)


def test_a_split_without_maps_is_an_error_and_no_endless_search():
  # Nearly all maps are without holes, so one split has no map.
  source = gymnasium.FrozenLake(size=2, frozen_probability=1 - 1e-9)
  with pytest.raises(ValueError, match="frozen_probability"):
    [source.task(0, split) for split in ("train", "eval")]
