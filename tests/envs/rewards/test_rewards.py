"""Rewards, with the traps that an agent would find in training."""

import asyncio
import dataclasses
import importlib.util
import json
import math
import pathlib
import pickle
import threading
from typing import Any

import pytest

from envs import base, mixture
from envs.rewards import math_process, rewards
from rl.settings import overrides
from tests.helpers import markdown

GUIDE = pathlib.Path(__file__).parents[3] / "docs/guides/rewards.md"
SCHEMA = json.dumps(
  {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "number"}},
    "required": ["city"],
  }
)
JUNK = [
  "",
  " \n\t",
  "I do not know.",
  "none",
  "null",
  "{}",
  "[]",
  "nan",
  "inf",
  "-Infinity",
  "٤٢",
  "\u200b",
  "\x00",
  "####",
  "\\boxed{}",
  "\\boxed{",
  "\\boxed{?}",
  "\\boxed{\\boxed{",
  "0",
  "1 2 3 4 5 6 7 8 9 10",
  "\\boxed{1,2,42,43}",
  "\\boxed{42 \\text{ or } 43}",
  "\\boxed{42} \\boxed{43}",
  "#### 42\n#### 43",
  "42 43",
  '{"city": "Bern"} {"city": "Rome"}',
  "42" * 50_000,
  "(" * 50_000,
]
TASK = base.Task("sums/train/0", 0, "train", 0, "42")
GRADE = base.Grade.single("x", 1.0)


def episode(content: str, reasoning: str | None = None) -> base.Transcript:
  question = base.Message("user", "6 * 7?")
  answer = base.Message("assistant", content, reasoning=reasoning)
  return base.Transcript([question, answer], [0.0])


def values(
  reward: base.Reward, answer: str | None, *contents: str
) -> list[float]:
  task = dataclasses.replace(TASK, answer=answer)
  episodes = [episode(content) for content in contents]
  return [g.value for g in asyncio.run(reward(task, episodes))]


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left():
  yield
  while math_process._idle:
    math_process._idle.pop().close()


def test_the_outcome_is_the_sum_of_the_step_rewards():
  transcripts = [
    base.Transcript([], [0.0, 0.5, 1.0]),
    base.Transcript([], [-1.0]),
  ]
  reward: base.Reward = rewards.Outcome()
  grades = asyncio.run(reward(TASK, transcripts))
  assert [g.value for g in grades] == [1.5, -1.0]
  assert [g.parts for g in grades] == [{"outcome": g.value} for g in grades]
  assert reward.stateless
  with pytest.raises(ValueError, match="no reward of its own"):
    asyncio.run(reward(TASK, [base.Transcript([], [])]))


def test_the_reward_of_the_guide_pays_for_each_word_in_its_place():
  names: dict[str, Any] = {"__name__": __name__}
  exec(markdown.block(GUIDE, "class Partial"), names)
  reward = names["Partial"]()
  # Of the longer of both: 4 of 4, 2 of 4, 4 of 5, 1 of 4.
  answers = ("d c b a", "d c a b", "d c b a a", "d", "")
  assert values(reward, "d c b a", *answers) == [1, 0.5, 0.8, 0.25, 0]


NUMBER = rewards.NumericMatch()
WITHIN = rewards.NumericMatch(relative=0.01)


@pytest.mark.parametrize(
  ("reward", "expected", "answer", "value"),
  [
    (rewards.ExactMatch(), "New York", " New\n York ", 1),
    (rewards.ExactMatch(), "New York", "new york", 0),
    (rewards.ExactMatch(ignore_case=True), "Straße", "STRASSE", 1),
    (rewards.ExactMatch(), "é", "e\u0301", 1),  # one letter, written twice
    (rewards.ExactMatch(), "42", "It is 42", 0),
    (rewards.ExactMatch(), "42", "４２", 0),
    (rewards.ExactMatch(find="boxed"), "B", r"A? \boxed{B}", 1),
    (rewards.ExactMatch(find="marker"), "B", "A\n#### B\n", 1),
    (rewards.ExactMatch(find="marker", marker="so:"), "B", "so: B", 1),
    (NUMBER, "42", "6 * 7 is 42.", 1),
    (NUMBER, "1,000", "1000.0", 1),
    (NUMBER, "1/3", "2/6", 1),
    (NUMBER, "42", "42 or 43", 0),
    (NUMBER, "9007199254740993", "9007199254740992", 0),
    (NUMBER, "1/3", "0.333", 0),
    (WITHIN, "1/3", "0.333", 1),
    (WITHIN, "100", "101", 1),
    (WITHIN, "100", "101.01", 0),
    (WITHIN, "0", "0.001", 0),
    (rewards.NumericMatch(absolute=0.3), "0", "-0.3", 1),
    (rewards.NumericMatch(relative=1e-3), "1,000", "999", 1),
    (rewards.NumericMatch(find="boxed"), "42", r"\boxed{\$42} of 50", 1),
    (rewards.NumericMatch(find="marker"), "42", "#### 41 42", 0),
  ],
)
def test_text_and_numbers_are_compared(reward, expected, answer, value):
  assert values(reward, expected, answer) == [value]


@pytest.mark.process
@pytest.mark.parametrize(
  ("expected", "answer", "value"),
  [
    (r"\frac{1}{2}", r"half: \boxed{0.5}", 1),
    (r"$\frac{1}{2}$", r"\boxed{$1/2$}", 1),
    (r"\frac{1}{2}", "0.5", 0),  # not in a box
    ("5", r"\boxed{5} \boxed{6}", 0),
    ("5", r"\boxed{6} \boxed{5}", 1),
    ("5", r"\boxed{x=5 \lor x=4}", 0),
    ("5", "\\boxed{" + "+0" * 500 + "5}", 0),  # too long
    (r"\text{Monday}", r"\boxed{monday}", 1),
    ("listen", r"\boxed{silent}", 0),
    ("listen", r"\boxed{\text{listen}}", 1),
    ("No", r"\boxed{no}", 1),
    ("No", r"\boxed{on}", 0),
    ("No solution", r"\boxed{\text{no solution}}", 1),
    ("xy", r"\boxed{yx}", 1),
    ("1010_2", r"\boxed{1010_{2}}", 1),
    ("1010_2", r"\boxed{1010_3}", 0),
    ("1010_2", r"\boxed{1010}", 0),
    ("1010", r"\boxed{1010_2}", 0),
    ("x^2_1", r"\boxed{x_1^2}", 1),
    ("10000", r"\boxed{10\,000}", 1),
    ("0", r"\boxed{10\,000}", 0),
    (r"1\,000{,}000", r"\boxed{1,000,000}", 1),
    ("18", r"\boxed{18.}", 1),
    (r"\text{Yes}", r"\boxed{\text{yes}.}", 1),
    ("90^\\circ", r"\boxed{90°}", 1),
    ("90°", r"\boxed{90}", 1),
    ("25", r"\boxed{25~\text{cm}}", 1),
  ],
)
def test_expressions_in_boxes_are_compared(expected, answer, value):
  assert values(rewards.MathMatch(), expected, answer) == [value]


@pytest.mark.parametrize(
  ("answer", "value"),
  [
    ('{"city": "Bern"}', 1),
    ('```json\n{"city": "Bern"}\n```', 1),
    (' {"city": "Bern", "days": 3} ', 1),
    ('{"city": 3}', 0),
    ('{"days": 3}', 0),
    ('{"city": "Bern", "days": NaN}', 0),
    ('{"city": "Bern", "days": 1e999}', 0),
    ('{"city": 3, "city": "Bern"}', 0),
    ('Here: {"city": "Bern"}', 0),
    ('{"city": "Bern"', 0),
    ('{"city": "Bern", "days": ' + "9" * 5000 + "}", 0),
    ('{"city": "Bern", "x": ' + "[" * 4000 + "]" * 4000 + "}", 0),
  ],
)
def test_json_is_checked_against_a_schema(answer, value):
  assert values(rewards.JsonSchema(schema=SCHEMA), None, answer) == [value]


def test_a_schema_may_be_a_file(tmp_path):
  path = tmp_path / "city.json"
  path.write_text(SCHEMA)
  reward = rewards.JsonSchema(schema=str(path))
  assert values(reward, None, '{"city": "Bern"}', "{}") == [1, 0]


@pytest.mark.process
@pytest.mark.parametrize(
  "reward",
  [
    rewards.ExactMatch(),
    rewards.ExactMatch(find="boxed"),
    rewards.ExactMatch(find="marker"),
    NUMBER,
    rewards.NumericMatch(find="whole"),
    rewards.NumericMatch(find="boxed"),
    rewards.NumericMatch(find="marker", relative=0.01),
    rewards.MathMatch(),
    rewards.MathMatch(find="whole"),
    rewards.MathMatch(find="marker"),
    rewards.JsonSchema(schema=SCHEMA),
    rewards.Weighted((rewards.Criterion("exact", rewards.ExactMatch()),)),
  ],
  ids=str,
)
def test_junk_earns_nothing(reward):
  assert values(reward, "42", *JUNK) == [0] * len(JUNK)


@pytest.mark.process
@pytest.mark.parametrize(
  "reward",
  [rewards.ExactMatch(), NUMBER, rewards.MathMatch(find="whole")],
  ids=str,
)
def test_an_answer_in_the_reasoning_alone_earns_nothing(reward):
  said = [episode("", "42"), episode("done", "42"), episode("42", "41")]
  grades = asyncio.run(reward(TASK, said))
  assert [g.value for g in grades] == [0, 0, 1]


@pytest.mark.process
def test_a_bomb_neither_holds_the_loop_nor_is_a_fault():
  reward = rewards.MathMatch(cpu_s=0.3)

  async def graded_beside_a_clock() -> tuple[float, int]:
    ticks = 0
    task = asyncio.create_task(
      reward(TASK, [episode(r"\boxed{9^{9^{9^{9^9}}}}")])  # type: ignore
    )
    while not task.done():
      await asyncio.sleep(0.01)
      ticks += 1
    return (await task)[0].value, ticks

  found = []
  thread = threading.Thread(
    target=lambda: found.append(asyncio.run(graded_beside_a_clock()))
  )
  thread.start()  # Not the main thread: signals would not work here.
  thread.join()
  value, ticks = found[0]
  assert value == 0
  assert ticks > 5


@dataclasses.dataclass
class Clock:
  """The most places that a call waited for, and held, at once."""

  waiting: int = 0
  held: int = 0
  most_waiting: int = 0
  most_held: int = 0

  def change(self, *, waiting: int = 0, held: int = 0) -> None:
    self.waiting += waiting
    self.held += held
    self.most_waiting = max(self.most_waiting, self.waiting)
    self.most_held = max(self.most_held, self.held)


@pytest.mark.process
def test_a_wait_for_a_process_does_not_count_against_the_deadline():
  clock = Clock()

  async def graded_by_the_clock() -> list[float]:
    base.CLOCK.set(clock)
    said = [episode(r"\boxed{42}")] * 2 * rewards._NUM_PROCESSES
    return [g.value for g in await rewards.MathMatch()(TASK, said)]

  assert set(asyncio.run(graded_by_the_clock())) == {1.0}
  assert clock.most_waiting >= rewards._NUM_PROCESSES
  assert clock.most_held == rewards._NUM_PROCESSES
  assert clock.waiting == clock.held == 0


@pytest.mark.parametrize(
  ("reward", "answer"),
  [
    (rewards.ExactMatch(), None),
    (NUMBER, ""),
    (NUMBER, "about forty"),
    (NUMBER, "6 * 7 = 42"),
    (NUMBER, r"\sqrt{42}"),
    (rewards.MathMatch(), None),
    (rewards.MathMatch(), "1+" * 600 + "1"),
  ],
)
def test_a_task_that_cannot_be_graded_is_refused_before_a_run(reward, answer):
  task = dataclasses.replace(TASK, answer=answer)
  both = rewards.Weighted((rewards.Criterion("a", reward),))
  rule = mixture.ByTask((mixture.RewardRule("sums", both),))
  for each in (reward, both, rule):
    with pytest.raises(ValueError, match="task sums/train/0 has"):
      each.check_task(task)
  with pytest.raises(ValueError, match="task sums/train/0 has"):
    values(reward, answer, "42")


def test_a_weighted_sum_reports_its_parts_by_name():
  reward = rewards.Weighted(
    (
      rewards.Criterion("number", rewards.NumericMatch(), weight=0.75),
      rewards.Criterion("form", rewards.JsonSchema(schema=SCHEMA), weight=0.25),
      rewards.Criterion("steps", rewards.Outcome(), weight=-2),
    )
  )
  said = base.Transcript([base.Message("assistant", "It is 42")], [0.5])
  (grade,) = asyncio.run(reward(TASK, [said]))
  # 0.75 * 1 + 0.25 * 0 - 2 * 0.5
  assert grade.value == -0.25
  assert grade.parts == {"number": 1.0, "form": 0.0, "steps": 0.5}
  assert reward.stateless


def test_a_weighted_sum_fails_where_one_of_its_rewards_does():
  reward = rewards.Weighted(
    (rewards.Criterion("a", NUMBER), rewards.Criterion("b", rewards.Outcome()))
  )
  with pytest.raises(ValueError, match="answer=None"):
    values(reward, None, "42")


@pytest.mark.parametrize("given", [None, 1.0, [1.0], [], GRADE, [GRADE] * 2])
def test_a_weighted_sum_names_the_criterion_that_gives_no_grades(given):
  class Broken:
    stateless = True

    async def __call__(self, task, transcripts):
      return given

  reward = rewards.Weighted(
    (rewards.Criterion("a", NUMBER), rewards.Criterion("mine", Broken()))
  )
  with pytest.raises(ValueError, match=r"criterion mine returned .*Grade$"):
    values(reward, "42", "42")


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: rewards.ExactMatch(marker=" "), "marker=' ' must be visible"),
    (lambda: rewards.NumericMatch(relative=1), r"relative=1 must be in \[0, 1"),
    (lambda: rewards.NumericMatch(absolute=math.nan), "absolute=nan must"),
    (lambda: rewards.MathMatch(cpu_s=0), "cpu_s=0 must be above 0"),
    (lambda: rewards.JsonSchema(schema="none.json"), "a readable file"),
    (lambda: rewards.JsonSchema(schema='{"type": 3}'), "is no schema"),
    (lambda: rewards.JsonSchema(schema="{"), "is no schema"),
    (lambda: rewards.JsonSchema(schema="{}"), "allows null"),
    (
      lambda: rewards.JsonSchema(schema='{"type": "object"}'),
      "allows {}, so an agent would learn to say only that",
    ),
    (lambda: rewards.Weighted(()), "at least one"),
    (
      lambda: rewards.Weighted((rewards.Criterion("a", NUMBER),) * 2),
      r"criteria \['a'\] are there twice",
    ),
    (lambda: rewards.Criterion("", NUMBER), "name='' of a criterion"),
    (lambda: rewards.Criterion("a", NUMBER, math.inf), "weight=inf of a must"),
  ],
)
def test_wrong_settings_say_what_to_do(make, message):
  with pytest.raises(ValueError, match=message):
    make()


@pytest.mark.parametrize(
  "make", [rewards.MathMatch, lambda: rewards.JsonSchema(schema=SCHEMA)]
)
def test_a_missing_package_names_its_extra(make, monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ValueError, match=r"pip install 'twinmesh\[rewards\]'"):
    make()


@dataclasses.dataclass(frozen=True)
class Run:
  """The setting of a run that rewards are for."""

  reward: base.Reward = rewards.Outcome()


@pytest.mark.parametrize(
  ("text", "reward"),
  [
    ("exact_match(find=boxed)", rewards.ExactMatch(find="boxed")),
    ("numeric_match(relative=1e-3)", rewards.NumericMatch(relative=1e-3)),
    ("math_match", rewards.MathMatch()),
    (f"json_schema(schema='{SCHEMA}')", rewards.JsonSchema(schema=SCHEMA)),
    (
      "weighted(criteria=[criterion(name=a, reward=exact_match, weight=2)])",
      rewards.Weighted((rewards.Criterion("a", rewards.ExactMatch(), 2),)),
    ),
  ],
)
def test_rewards_have_short_names_on_the_command_line(text, reward):
  assert overrides.override(Run(), "reward", text).reward == reward
  assert pickle.loads(pickle.dumps(reward)) == reward
  assert hash(reward) is not None
