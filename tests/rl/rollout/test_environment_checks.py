"""Each check finds the environment that breaks its rule, and no other does."""

import asyncio
import dataclasses
import functools
import itertools
import math
import re
import time
from collections.abc import Sequence
from typing import Any

import pytest

from envs import base, recordings, rows
from envs.rewards import answers, rewards
from models.chat import byte_chat, word_chat
from rl.rollout import environment_checks, environment_trial, episode
from rl.rollout import recordings as conversations
from rl.runtime import isolation

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
LIMITS = episode.Limits(turn_tokens=20, max_tokens=200, max_turns=4)
_counter = itertools.count()


@dataclasses.dataclass(frozen=True)
class Echo:
  """Says a number twice; an answer that repeats it earns a half."""

  flaw: str = ""
  tags: Any = ()
  name: str = "echo"

  def task(self, index: int, split: base.Split) -> base.Task:
    if self.flaw == "task raises":
      raise OSError("no such file")
    if self.flaw == "task changes":
      drawn = next(_counter)
      return base.Task(f"{self.name}/{split}/{index}", index, split, drawn)
    shown = "train" if self.flaw == "split is in no id" else split
    name = "other" if self.flaw == "other name" else self.name
    apart = 500 * (split == "eval" and self.flaw != "splits share tasks")
    return base.Task(f"{name}/{shown}/{index}", index, split, index + apart)

  def __call__(self, task: base.Task) -> "_Echo":
    return _Echo(self.flaw, task)

  def oracle(self, task: base.Task, messages: Sequence[base.Message]) -> str:
    return messages[-1].content

  def explore(
    self, task: base.Task, messages: Sequence[base.Message], seed: int
  ) -> str:
    right = self.oracle(task, messages)
    return right if self.flaw == "always right" else str(seed)


class _Echo:
  target = "state of the class, which every session starts anew"

  def __init__(self, flaw: str, task: base.Task):
    self._flaw, self._task, self._steps = flaw, task, 0
    self._said = str(1_000 + task.seed)
    self.tools: Any = {"tool raises": TOOLS, "tools": 5}.get(flaw, ())

  async def start(self) -> Sequence[base.Message]:
    if self._flaw == "random":
      self._said = str(next(_counter))
    if self._flaw == "held-out raises" and self._task.split == "eval":
      raise KeyError("held-out row")
    _Echo.target = self._said
    return [base.Message("user", self._said)]

  async def step(self, answer: base.Message) -> base.Step:
    self._steps += 1
    target = _Echo.target if self._flaw == "shared" else self._said
    right = answer.content == target
    reward = right / 2
    if self._flaw == "junk raises":
      int(answer.content)
    if self._flaw == "tool raises" and answer.tool_calls:
      assert answer.tool_calls[0].name != "add", "no argument a"
    if self._flaw == "junk pays":
      reward = max(reward, (not answer.content.strip()) / 2)
    if self._flaw == "nan":
      reward = math.nan
    if self._flaw == "blocks":
      time.sleep(0.06)
    if self._flaw == "waits":
      await asyncio.sleep(0.06)
    metrics = {"n": next(_counter)} if self._flaw == "random metric" else {}
    said = [base.Message("user", self._said)]
    if self._flaw == "wrong is not said" and not right:
      said = []
    if self._flaw == "wrong is blank" and not right:
      said = [base.Message("user", " ")]
    has_ended = self._steps == 2 and (self._flaw != "wrong goes on" or right)
    return base.Step(said, reward, has_ended, metrics)

  async def close(self) -> None:
    if self._flaw == "close raises":
      raise OSError("gone")
    if self._flaw == "close hangs":
      await asyncio.Event().wait()


@dataclasses.dataclass(frozen=True)
class Moody:
  """A reward that never gives the same grade twice."""

  stateless = True

  async def __call__(
    self, task: base.Task, transcripts: Sequence[base.Transcript]
  ) -> Sequence[base.Grade]:
    return [base.Grade(-float(next(_counter)), {}) for _ in transcripts]


def trial_of(source, reward=None, limits=LIMITS):
  return environment_trial.Trial(
    source=source,
    reward=reward or rewards.Outcome(),
    limits=limits,
    chat=byte_chat.ByteChat(),
    respond=environment_trial.demonstration(source),
    plays_well=True,
  )


def faults_of(source, num_tasks=3, **changes):
  trial = trial_of(source, **changes)
  _, results = asyncio.run(environment_checks.run(trial, num_tasks))
  return {r.name: r.fault for r in results if r.fault}


def test_it_tells_what_it_plays():
  told = []
  asyncio.run(environment_checks.run(trial_of(Echo()), 2, told.append))
  assert told == [
    "playing task 1/2",
    "playing task 2/2",
    "playing random answers",
    "playing the same answers again",
    "playing many sessions at once",
    "playing junk and held-out tasks",
  ]


def test_a_sound_environment_passes_all_checks():
  played, results = asyncio.run(environment_checks.run(trial_of(Echo()), 3))
  assert not [r for r in results if r.fault]
  assert [r.name for r in results] == [
    "source",
    "tasks",
    "episodes",
    "lengths",
    "times",
    "event loop",
    "close",
    "random answers",
    "repeats",
    "parallel sessions",
    "reward",
    "junk",
    "held-out tasks",
  ]
  seen = {r.name: r.seen for r in results}
  assert seen["episodes"] == "3 completed"
  # <user>1000<end><assistant> 1000<end> and the same again: 2 * (7 + 5).
  assert seen["lengths"] == "up to 24 tokens and 2 turns"
  # 31 bits against 1000, 1001 and 1002: all are wrong.
  assert seen["random answers"] == "3 completed; reward from 0 to 0"
  assert seen["reward"] == "from 1 to 1"
  assert seen["held-out tasks"].startswith("0 of 3 begin like")
  assert len(played) == 3


@pytest.mark.parametrize(
  ("flaw", "check", "words"),
  [
    ("task raises", "tasks", "task raised OSError: no such file"),
    ("task changes", "tasks", "task(0, 'train') gives another task"),
    ("split is in no id", "tasks", "has the id echo/train/0 of task(0, 'tr"),
    ("other name", "tasks", "has the id other/train/0, which must begin with"),
    ("tools", "episodes", "tools are int, not a list of JSON schemas"),
    ("nan", "episodes", "3 of 3 ended with a fault; echo/train/0: env_fault"),
    ("close raises", "close", "echo/train/0: close raised OSError: gone"),
    (
      "random",
      "repeats",
      "played twice with the same answers, echo/train/0",
    ),
    ("random metric", "repeats", "has other metrics"),
    ("shared", "parallel sessions", "sessions share state"),
    ("junk raises", "junk", "empty: env_fault: step raised ValueError"),
    ("tool raises", "junk", "1 of 13 answers; wrong arguments of add: env_fau"),
    ("junk pays", "junk", "3 of 12 answers; empty: earns 1; white space: earn"),
    ("held-out raises", "held-out tasks", "3 of 3 ended with a fault; echo/ev"),
  ],
)
def test_a_flaw_fails_its_own_check_alone(flaw, check, words):
  faults = faults_of(Echo(flaw))
  assert [*faults] == [check]
  assert words in faults[check]


def test_a_reward_that_changes_its_mind_is_found():
  faults = faults_of(Echo(), reward=Moody())
  assert [*faults] == ["reward"]
  assert "echo/train/0 was graded (-" in faults["reward"]


class _Socket:
  __hash__ = object.__hash__

  def __reduce__(self):
    raise TypeError("cannot pickle a socket")


@pytest.mark.parametrize(
  ("tags", "words"),
  [
    ([], "cannot be hashed (TypeError: unhashable type: 'list')"),
    (_Socket(), "cannot be pickled (TypeError: cannot pickle a socket"),
    (math.nan, "a pickled copy of it is not equal to it"),
  ],
)
def test_a_source_that_is_no_setting_is_found(tags, words):
  assert words in environment_checks.check_source(Echo(tags=tags)).fault


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"turn_tokens": 4}, "rollout.turn_tokens=4 cut 6 answers"),
    ({"max_turns": 1}, "rollout.max_turns=1 cut 3 episodes"),
    # One token of room is left for the second answer.
    ({"max_tokens": 20}, "rollout.max_tokens=20 cut 3 episodes"),
  ],
)
def test_a_limit_that_cuts_demonstrations_is_found(changes, words):
  limits = dataclasses.replace(LIMITS, **changes)
  trial = trial_of(Echo(), limits=limits)
  tasks = [trial.source.task(i, "train") for i in range(3)]
  played = [asyncio.run(environment_trial.play(trial, t)) for t in tasks]
  found = environment_checks.check_lengths(played, limits, plays_well=True)
  assert words in found.fault
  # A random player may be cut: it is counted, and no fault.
  found = environment_checks.check_lengths(played, limits, plays_well=False)
  assert not found.fault
  assert words in found.seen


def recorded():
  # Rows of 5 ids, of which 2 are trained, and one more with a strange word.
  rows_of_words = [{"prompt": "on on", "completion": "on"}] * 30
  return [*rows_of_words, {"prompt": "on", "completion": "off"}]


def test_recordings_that_cannot_be_trained_are_found():
  chat = word_chat.WordChat(("on",))
  source = recordings.Chats(rows=rows.Rows(data=recorded), prompt="prompt")
  load = functools.partial(
    conversations.load, source, chat, "train", length=8, max_length=8
  )
  found = environment_checks.check_recordings(load, 4)
  assert (found.fault, found.seen) == ("", "8 of 20 tokens are trained")
  found = environment_checks.check_recordings(load, 31)
  assert re.match(r"recorded\[30\]: word 'off' is not among", found.fault)
  short = functools.partial(load, length=4)
  found = environment_checks.check_recordings(short, 4)
  assert "its 5 tokens do not fit batch.length=4" in found.fault


@pytest.mark.parametrize(
  ("flaw", "words"),
  [
    (
      "wrong goes on",
      "3 of 3 episodes did not reach their end (rollout.max_turns=4 cut 3 "
      "episodes): raise the limit, or end them in step",
    ),
    # Of the two answers of each episode the second ends it.
    ("wrong is not said", "3 of 3 answers that did not end an episode got no"),
    ("wrong is blank", "3 of 3 answers that did not end an episode got no"),
    ("always right", "they earn as much as the demonstrations"),
    (
      "splits share tasks",
      "an evaluation may measure what was memorised",
    ),
  ],
)
def test_a_flaw_that_no_good_answer_shows_is_warned_of(flaw, words):
  _, results = asyncio.run(environment_checks.run(trial_of(Echo(flaw)), 3))
  warnings = {r.name: r.warning for r in results if r.warning}
  (check,) = warnings
  shared = flaw == "splits share tasks"
  assert check == ("held-out tasks" if shared else "random answers")
  assert warnings[check].startswith(words)


def test_random_answers_find_the_words_that_a_vocabulary_lacks():
  @dataclasses.dataclass(frozen=True)
  class Polite(Echo):
    words = tuple(str(n) for n in range(1_000, 1_064))

    def __call__(self, task):
      return _Polite(self.flaw, task)

    def explore(self, task, messages, seed):
      return self.words[seed % 8 + 8]

  class _Polite(_Echo):
    async def step(self, answer):
      step = await super().step(answer)
      sorry = [base.Message("user", "sorry")]
      return step if step.reward else dataclasses.replace(step, messages=sorry)

  source = Polite()
  trial = dataclasses.replace(
    trial_of(source), chat=word_chat.WordChat(source.words)
  )
  _, results = asyncio.run(environment_checks.run(trial, 3))
  faults = {r.name: r.fault for r in results if r.fault}
  assert faults["random answers"].startswith(
    "3 of 3 ended with a fault; echo/train/0: env_fault: its message cannot be "
    "read: "
  )
  assert "'sorry'" in faults["random answers"]
  assert "episodes" not in faults


def test_slow_calls_are_found_and_times_are_medians():
  trial = trial_of(Echo())
  played = asyncio.run(
    environment_trial.play(trial, trial.source.task(0, "train"))
  )
  slow = dataclasses.replace(
    played, seconds={"start": [2.0], "step": [0.25, 0.5, 6.0]}
  )
  found = environment_checks.check_times([slow], step_s=10.0)
  assert found.fault.startswith("a call took 6 s of the 10 s that rollout.step")
  assert found.seen == (
    "start 2 s (median), 2 s (max); step 500 ms (median), 6 s (max)"
  )
  assert not environment_checks.check_times([slow], step_s=12.0).fault


@pytest.mark.parametrize(
  ("flaw", "warned"), [("blocks", True), ("waits", False)]
)
def test_a_step_that_blocks_the_event_loop_is_warned_of(flaw, warned):
  trial = trial_of(Echo(flaw))
  played = asyncio.run(
    environment_trial.play(trial, trial.source.task(0, "train"))
  )
  assert played.trajectory.reward == 1
  found = environment_checks.check_event_loop([played])
  assert ("envs.workers.Processes" in found.warning) is warned
  assert not found.fault
  # Most steps decide, not one that loads something.
  blocked = {"step": [0.01, 0.02, 6.0]}
  rare = dataclasses.replace(played, blocked=blocked)
  assert not environment_checks.check_event_loop([rare]).warning


async def test_calls_that_fail_or_are_cancelled_are_timed_as_they_are():
  calls = []

  async def failing():
    await asyncio.sleep(0)
    raise OSError("gone")

  def wrong() -> Any:
    return 5

  async def resisting():
    try:
      await asyncio.Event().wait()
    except asyncio.CancelledError:
      calls.append("cancelled")
      await asyncio.sleep(0)
    return 5

  with pytest.raises(OSError, match="gone"):
    await environment_trial._Stretches(failing)
  with pytest.raises(isolation.NotAwaitable, match="returned int"):
    await environment_trial._Stretches(wrong)
  stretches = environment_trial._Stretches(resisting)

  async def awaited():
    return await stretches

  task = asyncio.create_task(awaited())
  await asyncio.sleep(0)
  task.cancel()
  assert await task == 5
  assert stretches.longest_s > 0
  assert calls == ["cancelled"]


def test_a_close_that_does_not_return_is_found():
  limits = dataclasses.replace(LIMITS, step_s=0.2)
  trial = trial_of(Echo("close hangs"), limits=limits)
  played = asyncio.run(
    environment_trial.play(trial, trial.source.task(0, "train"))
  )
  found = environment_checks.check_close([played])
  assert found.fault == "echo/train/0: close has not returned"


def test_a_close_that_is_no_coroutine_is_told_without_our_frames():
  class Closes(_Echo):
    def close(self) -> Any:
      pass

  class Source(Echo):
    def __call__(self, task):
      return Closes(self.flaw, task)

  trial = trial_of(Source())
  played = asyncio.run(
    environment_trial.play(trial, trial.source.task(0, "train"))
  )
  told = "close is no coroutine, it returned None; write async def"
  assert (played.closing, played.traceback) == (told, "")


def test_junk_holds_no_number_that_could_be_an_answer():
  said = map(str, environment_checks.JUNK.values())
  assert {answers.last_number(text) for text in said} == {None}


def test_answers_that_fail_at_times_are_not_blamed_on_the_tasks():
  asked = itertools.count()

  async def respond(question):
    if next(asked) == 5:  # The second answer when it plays again.
      raise ConnectionError("reset")
    return question.messages[-1].content

  trial = dataclasses.replace(trial_of(Echo()), respond=respond)
  _, results = asyncio.run(environment_checks.run(trial, 2))
  faults = {r.name: r.fault for r in results if r.fault}
  assert [*faults] == ["episodes again"]
  assert "giving an answer raised ConnectionError" in faults["episodes again"]


def test_where_nothing_can_be_played_the_other_checks_are_left_out():
  trial = trial_of(Echo("nan"))
  _, results = asyncio.run(environment_checks.run(trial, 2))
  assert results[-1].name == "close"
