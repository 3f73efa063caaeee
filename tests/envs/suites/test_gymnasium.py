import pickle

import pytest

from envs import base
from envs.suites import gymnasium

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


def test_a_source_is_a_setting():
  other = pickle.loads(pickle.dumps(SOURCE))
  assert other == SOURCE
  assert hash(other) == hash(SOURCE)


@pytest.mark.parametrize(
  "fields",
  [
    {"size": 1},
    {"size": 10**30},
    {"turns": 0},
    {"turns": 13, "size": 8},
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


GAMES = [
  gymnasium.FrozenLake(),
  gymnasium.Taxi(),
  gymnasium.CliffWalking(),
  gymnasium.Blackjack(),
]
games = pytest.mark.parametrize("game", GAMES, ids=lambda game: game.name)


def both_splits(game, count: int) -> list[base.Task]:
  return [
    game.task(i, split) for i in range(count) for split in ("train", "eval")
  ]


@games
def test_a_game_says_only_its_words_and_begins_the_same_again(play_all, game):
  tasks = both_splits(game, 100)
  agents = [
    game.oracle,
    lambda task, messages: game.explore(task, messages, len(messages)),
    script("invalid"),
  ]
  played = [play_all(game, tasks, agent) for agent in agents]
  said = {
    word
    for transcripts in played
    for transcript in transcripts
    for message in transcript.messages
    for word in message.content.split()
  }
  assert said <= {*game.words}
  assert len(game.words) == len({*game.words})
  assert play_all(game, tasks, game.oracle) == played[0]


@games
@pytest.mark.parametrize("junk", ["", " ", "0", "Left", "hit hit", "x" * 9999])
def test_junk_earns_nothing_and_ends(play_all, game, junk):
  for transcript in play_all(game, both_splits(game, 5), script(junk)):
    assert transcript.step_rewards == [0.0] * game.turns
    assert replies(transcript)[-1] == "lost"


@games
def test_no_start_of_evaluation_is_a_start_of_training(play_all, game):
  starts = {
    split: {
      replies(transcript)[0]
      for transcript in play_all(
        game, [game.task(i, split) for i in range(300)], game.oracle
      )
    }
    for split in ("train", "eval")
  }
  assert not starts["train"] & starts["eval"]
  assert min(map(len, starts.values())) > 3


@pytest.mark.parametrize("game", GAMES[1:3], ids=lambda game: game.name)
def test_the_oracle_of_a_game_without_luck_always_wins(play_all, game):
  for transcript in play_all(game, both_splits(game, 200), game.oracle):
    assert transcript.step_rewards[-1] == 1.0
    assert sum(transcript.step_rewards) == 1.0


def test_a_taxi_needs_at_most_18_actions(play_all):
  # Corner to corner is 4 + 4 and the walls add up to 2, twice: so at most
  # 8 + 8 moves, pickup and dropoff.
  game = gymnasium.Taxi()
  played = play_all(game, both_splits(game, 400), game.oracle)
  assert max(len(t.step_rewards) for t in played) <= 18


def test_a_wrong_pickup_changes_nothing(play):
  game = gymnasium.Taxi(turns=3)
  # At r0 c0, with the passenger at green.
  task = base.Task("taxi/train/0", 0, "train", 25)
  transcript = play(game, task, script("pickup", "dropoff"))
  assert replies(transcript) == [*["r0 c0 green red"] * 3, "lost"]


def test_the_way_around_the_cliff_from_the_corner_has_13_moves(play):
  # Up, eleven to the right, down.
  game = gymnasium.CliffWalking()
  task = base.Task("cliff_walking/train/0", 0, "train", 36)
  moves = [m.content for m in play(game, task, game.oracle).messages[1::2]]
  assert moves == ["up", *["right"] * 11, "down"]


def test_who_falls_off_the_cliff_is_back_at_the_corner(play):
  game = gymnasium.CliffWalking(turns=2)
  task = base.Task("cliff_walking/train/0", 0, "train", 36)
  transcript = play(game, task, script("right"))
  assert replies(transcript) == ["r3 c0", "cliff r3 c0", "lost"]


def test_basic_strategy_loses_little_and_beats_other_ways_to_play(play_all):
  # The best play without splitting or doubling loses about 0.05 of a bet: the
  # mean reward is (1 - 0.05) / 2 = 0.475, with a standard error of 0.011 in
  # 2,000 games.
  game = gymnasium.Blackjack()
  tasks = [game.task(i, "train") for i in range(2000)]
  agents = (game.oracle, script("stick"), script("hit"))
  best, sticks, hits = (
    sum(t.step_rewards[-1] for t in play_all(game, tasks, agent)) / 2000
    for agent in agents
  )
  assert 0.44 < best < 0.52
  assert best > sticks + 0.04 > hits


def test_a_draw_pays_half(play_all):
  game = gymnasium.Blackjack()
  played = play_all(game, both_splits(game, 100), game.oracle)
  paid = {(replies(t)[-1], t.step_rewards[-1]) for t in played}
  assert paid == {("win", 1.0), ("draw", 0.5), ("lose", 0.0)}


@pytest.mark.parametrize("kind", [type(game) for game in GAMES])
def test_a_game_without_turns_is_refused(kind):
  with pytest.raises(ValueError, match="turns=0"):
    kind(turns=0)
