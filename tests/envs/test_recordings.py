"""Recorded conversations: chats and pairs of rows, and their faults."""

import asyncio
import functools
import json
import pickle

import pyarrow
import pytest
from pyarrow import parquet

from envs import base, recordings, rows

USER = {"role": "user", "content": "hi"}
SAID = {"role": "assistant", "content": "ho"}
CALL = {
  "role": "assistant",
  "content": None,
  "reasoning_content": "hm",
  "tool_calls": [
    {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
  ],
}
RESULT = {"role": "tool", "content": "1", "tool_call_id": "1"}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture
def of(tmp_path):
  """Returns a function that makes rows, the same for both splits."""

  def of(*table):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in table))
    return rows.Rows(data=str(path), eval_data=str(path))

  return of


def test_a_chat_is_read_with_its_calls_and_tools(of):
  source = recordings.Chats(
    rows=of({"messages": [USER, CALL, RESULT, SAID], "tools": [TOOL]}),
    system="Be brief.",
  )
  source.validate()
  assert isinstance(source, base.Recorded)
  assert pickle.loads(pickle.dumps(source)) == source
  (((found),),) = source.examples("train")
  assert found.place.endswith("chats.jsonl:1")
  assert (found.tools, found.first) == ([TOOL], 0)
  assert found.messages == [
    base.Message("system", "Be brief."),
    base.Message("user", "hi"),
    base.Message(
      "assistant", "", (base.ToolCall("f", "{}", "1"),), reasoning="hm"
    ),
    base.Message("tool", "1", tool_call_id="1"),
    base.Message("assistant", "ho"),
  ]


@pytest.mark.parametrize(
  "shape",
  [lambda x: x, json.dumps, lambda x: [*map(json.dumps, x)]],
  ids=["schemas", "text", "texts"],
)
def test_rows_of_parquet_are_read_as_those_of_json(of, tmp_path, shape):
  table = []
  for name, arguments in [("weather", {"city": "Ulm"}), ("add", {"x": [1, 2]})]:
    named = {key: {"type": "string"} for key in arguments}
    tool = {"name": name, "parameters": {"properties": named}}
    function = {"name": name, "arguments": arguments}
    asked = SAID | {"tool_calls": [{"function": function}]}
    tools = [{"type": "function", "function": tool}]
    table.append(
      {"messages": [USER, asked, RESULT, SAID], "tools": shape(tools)}
    )
  path = str(tmp_path / "chats.parquet")
  parquet.write_table(pyarrow.Table.from_pylist(table), path)
  found = [
    [
      (one.messages, one.tools)
      for (one,) in recordings.Chats(rows=data).examples("train")
    ]
    for data in (of(*table), rows.Rows(data=path, eval_data=path))
  ]
  # A struct of Parquet has the members of all: city and x, here and there.
  assert found[0] == found[1]
  (call,) = found[1][0][0][1].tool_calls
  assert call == base.ToolCall("weather", '{"city": "Ulm"}')


def test_each_answer_may_be_an_example_of_its_own(of):
  source = recordings.Chats(
    rows=of({"messages": [USER, SAID, USER, SAID]}), each_answer=True
  )
  found = [x for (x,) in source.examples("train")]
  assert [(len(x.messages), x.first) for x in found] == [(2, 1), (4, 3)]


@pytest.mark.parametrize(
  "row",
  [
    {"prompt": "hi", "completion": "ho"},
    {"prompt": [USER, SAID, USER], "completion": [SAID]},
  ],
)
@pytest.mark.parametrize("each_answer", [False, True])
def test_of_a_prompt_and_its_completion_the_latter_is_trained(
  of, row, each_answer
):
  source = recordings.Chats(
    rows=of(row), prompt="prompt", system="Be brief.", each_answer=each_answer
  )
  source.validate()
  ((found,),) = source.examples("train")
  roles = [m.role for m in found.messages]
  assert roles[:2] == ["system", "user"]
  assert found.first == len(roles) - 1
  assert found.messages[-1] == base.Message("assistant", "ho")


def test_fields_that_say_nothing_are_no_fault(of):
  empty = {"refusal": None, "annotations": [], "audio": {}, "function_call": ""}
  # What is not trained may have any weight.
  prompt = [USER, SAID | {"weight": 0}, USER]
  row = {"prompt": prompt, "completion": [SAID | empty | {"weight": 1}]}
  source = recordings.Chats(rows=of(row), prompt="prompt")
  ((found,),) = source.examples("train")
  assert found.messages[-1] == base.Message("assistant", "ho")


def test_content_may_be_in_parts_and_a_developer_is_the_system(of):
  parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
  told = {"role": "developer", "content": "Be brief."}
  source = recordings.Chats(
    rows=of({"messages": [told, USER | {"content": parts}, SAID]})
  )
  ((found,),) = source.examples("train")
  assert found.messages[:2] == [
    base.Message("system", "Be brief."),
    base.Message("user", "hi"),
  ]


@pytest.mark.parametrize(
  ("row", "settings"),
  [
    ({"prompt": "hi", "chosen": "ho", "rejected": "no"}, {}),
    (
      {
        "prompt": [USER],
        "chosen": [SAID],
        "rejected": [SAID | {"content": "no"}],
      },
      {},
    ),
    (
      {"chosen": [USER, SAID], "rejected": [USER, SAID | {"content": "no"}]},
      {"prompt": None},
    ),
  ],
)
def test_a_pair_is_two_answers_to_one_conversation(of, row, settings):
  source = recordings.Pairs(rows=of(row), **settings)
  source.validate()
  ((chosen, rejected),) = source.examples("eval")
  assert [m.content for m in chosen.messages] == ["hi", "ho"]
  assert [m.content for m in rejected.messages] == ["hi", "no"]
  assert (chosen.first, rejected.first) == (1, 1)


@pytest.mark.parametrize(
  ("messages", "told"),
  [
    ([SAID], "message 0 is of the assistant, after nothing"),
    ([USER, SAID, SAID], "message 2 is of the assistant, after assistant"),
    ([USER, RESULT, SAID], "message 1 is of the tool, after user"),
    ([USER, SAID, RESULT, SAID], "message 2 is of the tool, after assistant"),
    (
      [USER, {"role": "system", "content": "x"}, SAID],
      "message 1 is of the system, after user",
    ),
    (
      [USER, SAID, USER],
      "its last message is of the user, so there is nothing",
    ),
    ("ho", "message 0 is of the assistant, after nothing"),
  ],
)
def test_a_chat_whose_turns_are_wrong_is_named(of, messages, told):
  source = recordings.Chats(
    rows=of({"messages": [USER, SAID]}, {"messages": messages})
  )
  with pytest.raises(
    ValueError, match=rf"chats\.jsonl:2: field 'messages': {told}"
  ):
    source.validate()


@pytest.mark.parametrize(
  ("source", "row", "told"),
  [
    (
      recordings.Chats,
      {"text": "x"},
      "no field 'messages', which messages asks",
    ),
    (
      recordings.Chats,
      {"messages": [USER, SAID], "tools": ["f"]},
      "field 'tools' must be a list of JSON schemas",
    ),
    (
      recordings.Chats,
      {"messages": [USER, SAID], "functions": [{"name": "f"}]},
      "field 'functions' is not read; use 'tools'",
    ),
    (
      recordings.Chats,
      {"messages": [USER, SAID | {"weight": 0}, USER, SAID]},
      "field 'messages': weight=0 of an answer",
    ),
    (
      functools.partial(recordings.Chats, prompt="prompt"),
      {"prompt": "x", "messages": [USER, SAID]},
      "no field 'completion', which completion asks",
    ),
    (
      functools.partial(recordings.Chats, prompt="prompt"),
      {"prompt": "hi", "completion": [USER, SAID]},
      "field 'completion': its first message is of the user, and not the",
    ),
    (
      recordings.Pairs,
      {"prompt": "hi", "chosen": [USER, SAID], "rejected": [USER, SAID]},
      "field 'chosen': .* leave out what the prompt holds, or read whole",
    ),
    (recordings.Pairs, {"prompt": "x", "chosen": "y"}, "no field 'rejected'"),
    (
      recordings.Pairs,
      {"prompt": "x", "chosen": "y", "rejected": "y"},
      "fields 'chosen' and 'rejected' do not differ; give two answers",
    ),
  ],
)
def test_a_row_that_is_no_example_is_named(of, source, row, told):
  with pytest.raises(ValueError, match=rf"chats\.jsonl:1: {told}"):
    source(rows=of(row)).validate()


def test_a_pair_needs_another_answer_and_not_a_longer_conversation(of):
  row = {"chosen": [USER, SAID, USER, SAID], "rejected": [USER, SAID]}
  told = "differ only in where they end; give two answers"
  with pytest.raises(ValueError, match=told):
    recordings.Pairs(rows=of(row), prompt=None).validate()


def test_whole_conversations_must_begin_alike(of):
  row = {
    "chosen": [USER, SAID],
    "rejected": [SAID | USER | {"content": "?"}, SAID],
  }
  with pytest.raises(ValueError, match="do not begin alike"):
    recordings.Pairs(rows=of(row), prompt=None).validate()


def test_its_words_are_those_of_its_messages(of):
  source = recordings.Pairs(
    rows=of({"prompt": "b a", "chosen": "c", "rejected": "a d"})
  )
  assert source.words == ["a", "b", "c", "d"]


def test_an_episode_pays_for_the_recorded_answer_alone(of):
  source = recordings.Chats(rows=of({"messages": [USER, SAID, USER, CALL]}))
  task = source.task(0, "eval")

  async def play(answer, source=source):
    environment = source(task)
    assert [m.role for m in await environment.start()] == [
      *("user", "assistant", "user")
    ]
    step = await environment.step(answer)
    return step.reward, step.done

  right = source.oracle(task, ())
  assert source.explore(task, (), 7) == right
  assert asyncio.run(play(right)) == (1.0, True)
  assert asyncio.run(play(base.Message("assistant", ""))) == (0.0, True)
  # What a chat parses has its thinking elsewhere.
  thought = SAID | {"content": "<think>\nhm\n</think>\n\nho"}
  row = {"messages": [USER, SAID, USER, thought]}
  said = base.Message("assistant", "ho", reasoning="hm")
  source = recordings.Chats(rows=of(row))
  assert asyncio.run(play(said, source)) == (1.0, True)
