import asyncio
import contextlib
import copy
import itertools
import random
import subprocess
import sys

import pytest

from envs import base
from envs.suites import textarena
from tests.helpers import processes
from twinmesh import top_packages

SOURCE = textarena.GuessTheNumber()
TASKS = [SOURCE.task(i, "train") for i in range(100)]


def explorer(task, messages):
  return SOURCE.explore(task, messages, 100 * task.seed + len(messages))


def script(*answers: str):
  """Returns an agent that gives fixed answers in turn."""
  # One user message first, then two messages a turn.
  return lambda task, messages: answers[len(messages) // 2]


def replies(transcript: base.Transcript) -> list[str]:
  return [m.content for m in transcript.messages if m.role == "user"]


@pytest.fixture
def target(play):
  """Returns a function from a task to its number, found by playing."""
  return lambda task: int(
    play(SOURCE, task, SOURCE.oracle).messages[-2].content
  )


@pytest.fixture
def eager_threads():
  """Lets threads interrupt each other after a microsecond instead of 5 ms."""
  interval_s = sys.getswitchinterval()
  sys.setswitchinterval(1e-6)
  yield
  sys.setswitchinterval(interval_s)


def test_the_oracle_always_finds_the_number(play_all):
  tasks = [*TASKS, *(SOURCE.task(i, "eval") for i in range(50))]
  for transcript in play_all(SOURCE, tasks, SOURCE.oracle):
    assert replies(transcript)[-1] == "correct"
    assert sum(transcript.step_rewards) == 1.0


def test_a_right_guess_on_the_last_turn_counts(play_all):
  played = play_all(SOURCE, TASKS, SOURCE.oracle)
  last = [t for t in played if len(t.step_rewards) == SOURCE.turns]
  # Binary search needs its fifth guess for 5 of 20 numbers: 1 + 2 + 4 + 8 = 15
  # are found before.
  assert last
  for transcript in last:
    assert replies(transcript)[-1] == "correct"
    assert transcript.step_rewards == [0.0, 0.0, 0.0, 0.0, 1.0]


def test_the_game_is_lost_after_as_many_wrong_guesses_as_turns(play, target):
  number = target(TASKS[0])
  wrong = [str(n) for n in range(1, 21) if n != number][:5]
  transcript = play(SOURCE, TASKS[0], script(*wrong))
  assert replies(transcript)[-1] == "lost"
  assert transcript.step_rewards == [0.0] * 5


@pytest.mark.parametrize(
  ("reason", "word"),
  [
    ("Congratulations! You guessed the correct number.", "correct"),
    ("The turn limit has been reached. Guess: 7, Target: 7", "correct"),
    ("The turn limit has been reached. Guess: 7, Target: 17", "lost"),
    ("Invalid Move: Invalid move format.", "lost"),
  ],
)
def test_the_verdict_is_read_off_the_reason(reason, word):
  assert textarena._verdict(reason) == word


def test_a_reason_that_is_not_known_is_an_error_and_not_a_loss():
  with pytest.raises(ValueError, match="Well done"):
    textarena._verdict("Well done!")


def test_hints_point_to_the_number(play, target):
  number = target(TASKS[1])
  for guess in (n for n in range(1, 21) if n != number):
    said = replies(play(SOURCE, TASKS[1], script(str(guess), "x", "x")))
    hint = "higher" if guess < number else "lower"
    assert said == ["guess", hint, "invalid", "lost"]


def test_a_repeated_guess_is_invalid_and_costs_no_turn(play, target):
  number = target(TASKS[2])
  a, b, c, d = [str(n) for n in range(1, 6) if n != number][:4]
  answers = (a, a, b, b, c, d, str(number))
  transcript = play(SOURCE, TASKS[2], script(*answers))
  said = replies(transcript)
  assert [i for i, word in enumerate(said) if word == "invalid"] == [2, 4]
  assert said[-1] == "correct"


def test_the_second_invalid_answer_in_a_row_loses(play, target):
  wrong = "1" if target(TASKS[3]) != 1 else "2"
  transcript = play(SOURCE, TASKS[3], script(wrong, wrong, wrong))
  assert replies(transcript)[-2:] == ["invalid", "lost"]
  assert transcript.step_rewards == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
  "text", ["", "abc", "0", "21", "-3", "1.5", "²", "[", "[x]", "9" * 5000]
)
def test_garbage_is_invalid_and_no_fault(play, text):
  transcript = play(SOURCE, TASKS[4], script(text, text))
  assert replies(transcript) == ["guess", "invalid", "lost"]


def test_explorers_play_by_the_rules_and_sometimes_win(play_all):
  played = play_all(SOURCE, TASKS, explorer)
  assert all("invalid" not in replies(t) for t in played)
  # 5 different numbers of 20 hold the right one in 25 of 100 games; the
  # standard deviation is 4.3.
  assert 5 < sum(sum(t.step_rewards) for t in played) < 50
  assert explorer(TASKS[0], []) == explorer(TASKS[0], [])


def test_every_word_that_is_said_is_declared(play_all):
  agents = [SOURCE.oracle, explorer, script(*["5"] * 5)]
  played = itertools.chain(*(play_all(SOURCE, TASKS, a) for a in agents))
  said = {w for t in played for m in t.messages for w in m.content.split()}
  assert said == set(SOURCE.words)
  assert len(SOURCE.words) == len(set(SOURCE.words)) == 26


def test_a_task_has_one_number_even_among_threads(play_all, eager_threads):
  tasks = [TASKS[i] for _ in range(1000) for i in (5, 6, 7, 8)]
  played = play_all(SOURCE, tasks, SOURCE.oracle)
  games = {
    (t.id, tuple(replies(p))) for t, p in zip(tasks, played, strict=True)
  }
  assert len(games) == 4


@pytest.mark.process
def test_a_game_leaves_the_global_generator_as_it_was():
  # In a process without threads of other tests, which may draw from it, too.
  played = (
    "import random; from envs.suites import textarena\n"
    "game = lambda: textarena.Game('GuessTheNumber-v0', 1, seed=7)\n"
    "game(); random.seed(0); before = random.getstate()\n"
    "game().play('[3]'); print(random.getstate() == before)"
  )
  done = subprocess.run(
    [sys.executable, "-c", played],
    cwd=top_packages.ROOT,
    capture_output=True,
    text=True,
    timeout=processes.DEADLINE_S,
  )
  assert done.stdout == "True\n", done.stderr


def test_all_numbers_occur_in_training(play_all):
  played = play_all(SOURCE, [*TASKS, SOURCE.task(100, "train")], SOURCE.oracle)
  assert len({t.messages[-2].content for t in played}) == 20


def test_splits_share_no_seed():
  seeds = {
    s: {SOURCE.task(i, s).seed for i in range(1000)} for s in ("train", "eval")
  }
  assert not seeds["train"] & seeds["eval"]
  assert len(seeds["train"]) == len(seeds["eval"]) == 1000
  assert SOURCE.task(17, "train").id == "guess_number/train/17"


@pytest.mark.parametrize(
  "fields",
  [{"low": 5, "high": 5}, {"low": -1}, {"high": 2**31}, {"turns": 0}],
)
def test_settings_that_cannot_work_are_refused(fields):
  with pytest.raises(ValueError, match=next(iter(fields))):
    textarena.GuessTheNumber(**fields)


def presses(env, seed):
  """Returns the lights that were pressed to scramble a game of LightsOut."""
  draw = random.Random(seed)
  return [
    f"[{draw.randint(0, 4)} {draw.randint(0, 4)}]"
    for _ in range(draw.randint(5, 15))
  ]


def safe_cells(env, seed):
  """Yields cells of Minesweeper; the first move is always safe."""
  for row, column in itertools.product(range(env.rows), range(env.cols)):
    if env.grid[row][column] != -1 and not env.revealed[row][column]:
      yield f"[{row} {column}]"


def way(env, seed):
  """Yields a way over the frozen lake that never goes back up or left."""
  grid, size = env.state.game_state["grid"], env.size
  for path in itertools.permutations(["[down]", "[right]"] * (size - 1)):
    row = column = 0
    cells = []
    for move in path:
      row, column = row + (move == "[down]"), column + (move == "[right]")
      cells.append(grid[row][column])
    if "H" not in cells:
      return path
  raise ValueError("no such way")


def merges(env, seed):
  """Yields moves of 2048 that change the board."""
  moves = ("[up]", "[down]", "[left]", "[right]")
  while True:
    boards = ((copy.deepcopy(env), i) for i in (3, 1, 2, 0))
    yield next(moves[i] for board, i in boards if board._apply_move(i)[0])


def best(env, seed):
  """Yields the answers of a secretary who knows all values."""
  draws = env.state.game_state["draws"]
  return ["[continue]"] * draws.index(max(draws)) + ["[accept]"]


def missing(env, seed):
  """Yields what is missing in a sudoku."""
  for row, column in itertools.product(range(9), range(9)):
    if not env.game_board[row][column]:
      yield f"[{row + 1} {column + 1} {env.full_grid[row][column]}]"


WINNERS = {
  "2048-v0-ultra-easy": merges,
  "FrozenLake-v0": way,
  "LightsOut-v0": presses,
  "Mastermind-v0": lambda env, seed: [
    str(env.state.game_state["secret_code"]).replace(",", "")
  ],
  "Minesweeper-v0-small": safe_cells,
  "Secretary-v0": best,
  "Sudoku-v0-very-easy": missing,
  "ThreeCardMonte-v0": lambda env, seed: [f"[{env.ball_pos}]"],
}


def solo(game):
  return textarena.SinglePlayer(game=game)


def random_player(source):
  return lambda task, messages: source.random_answer(
    100 * task.seed + len(messages)
  )


@pytest.mark.parametrize("game", WINNERS)
def test_the_solution_of_a_game_pays_once_and_in_full(game):
  source, pays = solo(game), []

  async def play(task):
    episode = source(task)
    await episode.start()
    for answer in WINNERS[game](episode._game.env, task.seed):
      step = await episode.step(base.Message("assistant", answer))
      if step.done:
        return step.reward
      assert step.reward == 0
    return 0.0

  # Some lakes have no way that is a shortest one, and 2048 needs luck.
  for index in range(10):
    with contextlib.suppress(ValueError):
      pays.append(asyncio.run(play(source.task(index, "train"))))
  assert pays.count(1.0) >= 5
  assert set(pays) <= {0.0, 1.0}
  assert game.startswith("2048") or set(pays) == {1.0}


@pytest.mark.parametrize(
  "game",
  ["Mastermind-v0"]
  + [
    pytest.param(g, marks=pytest.mark.slow)
    for g in WINNERS
    if g != "Mastermind-v0"
  ],
)
def test_a_game_for_one_passes_all_checks_of_a_trial(faults_of, game):
  assert not faults_of(solo(game), random_player(solo(game)))


def test_every_family_of_games_is_tried():
  assert {name.partition("-v0")[0] for name in WINNERS} == {*textarena.GAMES}


def test_an_invalid_answer_earns_nothing_although_2048_pays_for_it():
  # With a tile of 32 on the board, textarena's reward for junk is 1.
  game = textarena.Game("2048-v0-ultra-easy", 1, 0)
  game.state.game_state["board"][0][0] = 32
  assert not game.play("junk")
  assert game.play("junk")
  assert game.state.rewards == {0: 1.0}
  assert not textarena._is_won(game)


def test_the_first_mine_loses():
  source = solo("Minesweeper-v0-small")
  episode = source(source.task(0, "train"))

  async def play():
    await episode.start()
    await episode.step(base.Message("assistant", "[0 0]"))
    grid = episode._game.env.grid
    at = next(
      (r, c) for r, row in enumerate(grid) for c, x in enumerate(row) if x < 0
    )
    return await episode.step(base.Message("assistant", f"[{at[0]} {at[1]}]"))

  step = asyncio.run(play())
  assert (step.reward, step.done) == (0.0, True)
  assert "You hit a mine" in step.messages[0].content


def test_the_move_behind_a_long_thought_counts():
  game = textarena.Game("FrozenLake-v0", 1, 0)
  game.play("I think. " * 1000 + "[right]")
  assert "invalid" not in game.said(0)
  # int() raises for so many digits.
  assert not textarena.Game("Minesweeper-v0-small", 1, 0).play(
    f"[{'1' * 5000} 1]"
  )


def test_points_without_the_tile_do_not_win_2048():
  # On a large board many tiles of half the size have points enough.
  game = textarena.Game("2048-v0-ultra-easy", 1, 0)
  game.state.set_outcome(reward=1.0, reason="No moves left.")
  assert not textarena._is_won(game)


def test_a_game_draws_the_same_numbers_whatever_others_draw():
  # 2048 draws a tile at every move.
  def boards(disturb):
    game, seen = textarena.Game("2048-v0", 1, 7), []
    for move in ("[left]", "[down]", "[right]", "[up]") * 5:
      disturb()
      game.play(move)
      seen.append(copy.deepcopy(game.state.game_state["board"]))
    return seen

  before = random.getstate()
  once = boards(lambda: None)
  assert random.getstate() == before
  assert boards(random.random) == once


def test_turns_of_a_game_for_one_are_counted(play):
  source = textarena.SinglePlayer(game="Mastermind-v0", turns=3)
  transcript = play(source, source.task(0, "train"), random_player(source))
  assert transcript.step_rewards == [0.0] * 3
  assert replies(transcript)[-1] == "No turns are left."


def test_no_code_of_evaluation_is_one_of_training():
  source = solo("Mastermind-v0")

  def codes(split):
    tasks = (source.task(i, split) for i in range(200))
    games = (textarena._dealt(source.game, task.seed) for task in tasks)
    return {tuple(g.state.game_state["secret_code"]) for g in games}

  assert not codes("train") & codes("eval")


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"game": "Mastermnd-v0"}, "Mastermnd-v0: must be one of Mastermind-v0"),
    ({"game": "Hangman-v0"}, "game=Hangman-v0: must be one of"),
    ({"game": "Sudoku-v0-hard"}, "game=Sudoku-v0-hard: must be one of"),
    ({"turns": 0}, "turns=0"),
    ({"game": "2048-v0-very-easy", "turns": 61}, "takes at least 62"),
  ],
)
def test_games_that_cannot_be_played_are_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    textarena.SinglePlayer(**fields)


def test_a_run_without_textarena_is_told_which_extra_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, "textarena", None)
  with pytest.raises(ValueError, match=r"pip install 'twinmesh\[envs\]'"):
    textarena.SinglePlayer()
