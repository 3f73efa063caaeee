import itertools
import pickle
import random
import sys

import pytest

from envs import base
from envs.suites import textarena

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


def test_a_game_leaves_the_global_generator_as_it_was(play):
  random.seed(0)
  before = random.getstate()
  play(SOURCE, TASKS[0], SOURCE.oracle)
  assert random.getstate() == before


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


def test_256_games_at_the_same_time_all_end(play_all):
  tasks = [SOURCE.task(i, "train") for i in range(256)]
  played = play_all(SOURCE, tasks, SOURCE.oracle)
  assert sum(sum(t.step_rewards) for t in played) == 256


def test_a_source_is_a_setting():
  other = pickle.loads(pickle.dumps(SOURCE))
  assert other == SOURCE
  assert hash(other) == hash(SOURCE)


@pytest.mark.parametrize(
  "fields", [{"low": 5, "high": 5}, {"low": -1}, {"turns": 0}]
)
def test_settings_that_cannot_work_are_refused(fields):
  with pytest.raises(ValueError, match=next(iter(fields))):
    textarena.GuessTheNumber(**fields)
