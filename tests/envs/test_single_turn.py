"""Rows become questions, and a function grades their answers."""

import asyncio
import dataclasses
import json
import pickle
import threading
from typing import Any

import pytest

from configs import sums
from envs import base, rows, single_turn
from rl.data import trajectory
from tests.helpers import scripted_chats


def test_the_example_of_the_guide_is_graded():
  sums.SUMS.validate()
  task = sums.SUMS.task(3, "eval")
  row = sums.SUMS.rows.record(task.seed, "eval").fields
  right = base.Message(
    "assistant", f"It is {row['answer']}", reasoning="quick: 0"
  )
  for said, reward in (
    (right, 1.0),
    (scripted_chats.say(f"{row['answer']} or 99"), 0.0),
    (scripted_chats.say(""), 0.0),
    (scripted_chats.calling("add"), 0.0),
  ):
    played, text, shown = scripted_chats.play(sums.SUMS, said, task=task)
    assert played.status is trajectory.Status.COMPLETED, played.fault
    asked = f"{row['question']} End with the number alone."
    assert text.messages == [base.Message("user", asked), said]
    assert text.step_rewards == [reward]
    assert f"<|im_start|>user\n{asked}<|im_end|>" in shown


def test_it_is_a_setting():
  assert isinstance(sums.SUMS, base.Source)
  assert hash(pickle.loads(pickle.dumps(sums.SUMS))) == hash(sums.SUMS)


def test_tasks_go_through_the_rows_and_splits_share_none():
  number = {
    split: {sums.SUMS.task(i, split).seed for i in range(60)}
    for split in ("train", "eval")
  }
  assert len(number["train"]) + len(number["eval"]) == 30
  assert not number["train"] & number["eval"]
  assert sums.SUMS.task(5, "train").id == "single_turn/train/5"


def test_a_field_with_solutions_demonstrates():
  solved = sums.SUMS
  assert base.demonstrator(solved) is solved
  task = solved.task(3, "train")
  row = solved.rows.record(task.seed, "train").fields
  assert solved.oracle(task, []) == row["answer"]
  others = {solved.explore(task, [], seed) for seed in range(99)}
  assert len(others) > 5
  with pytest.raises(ValueError, match="no demonstrations: name the field"):
    base.demonstrator(dataclasses.replace(solved, solution=None))
  lacking = dataclasses.replace(sums.SUMS, solution="steps")
  with pytest.raises(ValueError, match="no field 'steps', which solution"):
    lacking.validate()


def test_an_answer_may_stand_within_a_field_and_be_a_list(tmp_path):
  row = {
    "q": "x",
    "reward_model": {"ground_truth": 42, "tests": ["a", {"b": 1}]},
  }
  for field, answer in [
    ("reward_model.ground_truth", "42"),
    ("reward_model.tests", '["a", {"b": 1}]'),
  ]:
    source = asked(tmp_path / "rows.jsonl", row, prompt="{q}", answer=field)
    source.validate()
    assert source.task(0, "train").answer == answer
  lacking = dataclasses.replace(source, answer="q.truth")
  with pytest.raises(ValueError, match=r"no field 'q\.truth', which answer"):
    lacking.validate()


def never(answer, row):
  raise AssertionError


def asked(file, *table, **settings):
  """Returns a source of rows, with the same ones for both splits."""
  file.write_text("".join(f"{json.dumps(row)}\n" for row in table))
  own = rows.Rows(data=str(file), eval_data=str(file))
  given: dict[str, Any] = {"grade": never, **settings}
  return single_turn.SingleTurn(rows=own, **given)


@pytest.fixture
def file(tmp_path):
  return tmp_path / "data.jsonl"


def test_a_prompt_takes_fields_and_parts_of_fields(file):
  source = asked(
    file,
    {"q": "{x}?", "of": {"a": 1}, "many": [1, 2]},
    prompt="{q} {of[a]} {many[1]:>3} {{json}}",
    system="Be brief.",
  )
  source.validate()
  record = source.rows.record(0, "train")
  assert source.opening(record) == [
    base.Message("system", "Be brief."),
    base.Message("user", "{x}? 1   2 {json}"),
  ]


@pytest.mark.parametrize(
  "chat",
  [
    "Go.",
    [{"role": "user", "content": "Go.", "name": None}],
  ],
)
def test_a_conversation_of_a_row_is_shown(file, chat):
  source = asked(file, {"chat": chat}, messages="chat")
  source.validate()
  record = source.rows.record(0, "train")
  assert source.opening(record) == [base.Message("user", "Go.")]


def test_a_conversation_keeps_its_own_system_message(file):
  chat = [
    {"role": "system", "content": "Own."},
    {"role": "user", "content": "Go."},
  ]
  source = asked(file, {"chat": chat}, messages="chat", system="Other.")
  opening = source.opening(source.rows.record(0, "train"))
  assert [m.content for m in opening] == ["Own.", "Go."]


def test_a_reward_of_the_run_reads_the_answer_of_the_task(file):
  row = {"q": "6 x 7?", "a": 42}
  source = asked(file, row, prompt="{q}", answer="a", grade=None)
  source.validate()
  assert source.task(0, "train").answer == "42"
  _, text, _ = scripted_chats.play(source, scripted_chats.say("42"))
  assert text.step_rewards == [0.0]


def raising(answer, row):
  raise KeyError("gold")


@pytest.mark.parametrize(
  ("grade", "told"),
  [
    (raising, "step raised KeyError: 'gold'"),
    (lambda answer, row: None, "reward is None, not a number"),
    (lambda answer, row: float("nan"), "reward nan is not a finite number"),
    (lambda answer, row: "1", "reward is str, not a number"),
  ],
)
def test_a_grader_that_fails_is_a_fault_and_no_reward(file, grade, told):
  source = asked(file, {"q": "?"}, prompt="{q}", grade=grade)
  played, _, _ = scripted_chats.play(source, scripted_chats.say("yes"))
  assert played.status is trajectory.Status.ENV_FAULT
  assert told in played.fault


def test_a_coroutine_grades_on_the_event_loop(file):
  async def grade(answer, row):
    await asyncio.sleep(0)
    return answer == row["a"]

  source = asked(file, {"q": "?", "a": "yes"}, prompt="{q}", grade=grade)
  _, text, _ = scripted_chats.play(source, scripted_chats.say("yes"))
  assert text.step_rewards == [1.0]


def test_a_grader_runs_in_a_thread_on_a_row_of_its_own(file):
  names = []

  def grade(answer, row):
    names.append(threading.current_thread().name)
    row["seen"].append(answer)
    return len(row["seen"])

  source = asked(file, {"seen": []}, prompt="{seen}", grade=grade)
  for _ in range(2):
    _, text, _ = scripted_chats.play(source, scripted_chats.say("yes"))
    assert text.step_rewards == [1.0]
  assert names == ["environment"] * 2


@pytest.mark.parametrize(
  ("row", "settings", "told"),
  [
    ({"a": 1}, {"prompt": "{q}"}, ":2: no field 'q', which prompt asks for; "),
    ({"q": None}, {"prompt": "{q}"}, ":2: null in field 'q', which prompt"),
    ({"q": "x"}, {"prompt": "{q[a]}"}, ":2: prompt='{q.a.}' does not fit"),
    (
      {"q": {"a": 1}},
      {"prompt": "{q.a}"},
      ":1: prompt='{q.a}' does not fit it: .*; a field within a field is {name",
    ),
    ({"q": "x"}, {"messages": "chat"}, ":2: no field 'chat', which messages"),
    ({"q": 5}, {"messages": "q"}, ":2: field 'q': 5 is no list of messages"),
    (
      {"q": "x"},
      {"messages": "q", "answer": "a"},
      ":2: no field 'a', which answer asks for",
    ),
    (
      {"q": "x", "a": {"b": "12"}},
      {"messages": "q", "answer": "q", "solution": "a"},
      ":2: field 'a' is dict, and solution must be a text or a number",
    ),
  ],
)
def test_a_row_that_lacks_something_is_named_before_a_run(
  file, row, settings, told
):
  good = {"q": {"a": "x"} if "[" in str(settings) else "x", "a": "y"}
  good |= {"chat": "x"}
  with pytest.raises(ValueError, match=f"data.jsonl{told}"):
    asked(file, good, row, **settings).validate()


@pytest.mark.parametrize(
  ("settings", "told"),
  [
    ({}, "prompt=None with messages=None: give one of the two"),
    ({"prompt": "{q}", "messages": "chat"}, "give one of the two"),
    ({"prompt": "What?"}, "prompt='What.' names no field, or a wrong one"),
    ({"prompt": "{} {0}"}, "names no field, or a wrong one"),
    ({"prompt": "{q"}, "write a field of the row as {name}, and double other"),
    ({"prompt": "{q}", "grade": None}, "nothing tells a good answer"),
    ({"prompt": "{q}", "name": "a/b"}, "name='a/b'"),
    (
      {"prompt": "{q}", "grade": lambda answer, row, why: 1.0},
      "is called with an answer and its row.*: missing .* 'why'",
    ),
    (
      {"prompt": "{q}", "grade": lambda **given: 1.0},
      "is called with an answer and its row.*: too many positional",
    ),
    ({"prompt": "{q}", "grade": 5}, "grade=5 .*: 5 is not a callable object"),
  ],
)
def test_wrong_settings_are_refused(file, settings, told):
  with pytest.raises(ValueError, match=told):
    asked(file, {"q": "x"}, **settings)
