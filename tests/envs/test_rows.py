"""Rows of files and sources: their splits, and what is wrong with them."""

import json
import os
import pickle
import sys

import grain
import pyarrow
import pytest
from pyarrow import parquet

from envs import rows

TABLE = [{"id": i, "question": f"q{i // 2}"} for i in range(60)]


@pytest.fixture
def file(tmp_path):
  """Returns a function that writes rows and returns the path."""

  def file(table, name="data.jsonl"):
    path = tmp_path / name
    if path.suffix == ".parquet":
      parquet.write_table(pyarrow.Table.from_pylist(table), path)
    else:
      lines = (x if isinstance(x, str) else json.dumps(x) for x in table)
      path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)

  return file


def ids(data, split):
  """Returns the ids of a split once around."""
  numbers, index = [], 0
  while (n := data.number(index, split)) not in numbers:
    numbers.append(n)
    index += 1
  assert data.number(index, split) == numbers[0]
  return [data.record(n, split).fields["id"] for n in numbers]


@pytest.mark.parametrize("name", ["data.jsonl", "data.parquet"])
def test_each_row_is_in_one_split_whatever_its_place(file, name):
  data = rows.Rows(data=file(TABLE, name), eval_every=4)
  train, held_out = ids(data, "train"), ids(data, "eval")
  assert sorted(train + held_out) == list(range(60))
  # One in four of 60 are 15; a hash draws them, so 5 to 25 is three sigma.
  assert 5 <= len(held_out) <= 25
  turned = rows.Rows(data=file(TABLE[::-1], f"turned.{name}"), eval_every=4)
  assert sorted(ids(turned, "eval")) == sorted(held_out)


def test_rows_that_agree_in_a_field_are_in_one_split(file):
  data = rows.Rows(data=file(TABLE), eval_every=3, split_by="question")
  held_out = ids(data, "eval")
  assert {i ^ 1 for i in held_out} == {*held_out}


def test_a_file_of_its_own_is_for_evaluation_alone(file):
  data = rows.Rows(
    data=file(TABLE[:40]), eval_data=file(TABLE[40:], "held_out.parquet")
  )
  assert ids(data, "train") == list(range(40))
  assert ids(data, "eval") == list(range(40, 60))
  assert data.record(0, "eval").place.endswith("held_out.parquet: row 1")


@pytest.mark.parametrize(
  ("settings", "row"),
  [({}, TABLE[3]), ({"split_by": "question"}, {"id": 99, "question": "q1"})],
)
def test_a_row_for_training_and_for_evaluation_is_refused(file, settings, row):
  held_out = file([*TABLE[40:], row], "held_out.parquet")
  data = rows.Rows(data=file(TABLE[:40]), eval_data=held_out, **settings)
  told = "row 21 is in .*data.jsonl too, as are 1 of the 21 rows of eval_data"
  with pytest.raises(ValueError, match=told):
    next(data.known())


def test_a_row_that_is_changed_changes_no_other(file):
  data = rows.Rows(
    data=file([{"id": [1]}] * 3), eval_data=file([{"id": 2}], "e.jsonl")
  )
  data.record(0, "train").fields["id"].append(2)
  assert data.record(0, "train").fields["id"] == [1]


def test_it_is_a_setting_and_leaves_the_data_behind(file):
  data = rows.Rows(data=file(TABLE))
  small = len(pickle.dumps(data))
  assert data.number(0, "train") >= 0
  assert len(pickle.dumps(data)) == small
  assert pickle.loads(pickle.dumps(data)) == data
  assert hash(data) == hash(rows.Rows(data=data.data))


def test_blank_lines_and_a_byte_order_mark_are_no_rows(file):
  path = file(["\ufeff" + '{"id": 0}', "", '{"id": 1}', "  "])
  data = rows.Rows(data=path, eval_data=path)
  assert ids(data, "train") == [0, 1]
  assert data.record(1, "train").place == f"{path}:3"


READ: list[int] = []


class Source:
  """A source that notes what is read of it."""

  def __len__(self):
    return 1000

  def __getitem__(self, number):
    READ.append(int(number))
    return {"id": int(number)}


def test_a_source_is_read_row_by_row():
  READ.clear()
  data = rows.Rows(data=Source)
  first, held_out = data.number(0, "train"), data.number(0, "eval")
  assert not READ
  assert [r.fields["id"] for r in data.known()] == READ == [first, held_out]
  assert data.record(7, "train") == rows.Record("Source[7]", {"id": 7})


class ArrowSource:
  """A source as Hugging Face's datasets makes one."""

  __module__ = "datasets.arrow_dataset"

  def __len__(self):
    return 100

  def __getitem__(self, number):
    return {"id": None, "call": [{"city": "Ulm", "x": None}]}


def test_members_that_a_dataset_adds_to_structs_are_left_out():
  record = rows.Rows(data=ArrowSource).record(3, "train")
  assert record.fields == {"id": None, "call": [{"city": "Ulm"}]}


def of_grain():
  return grain.MapDataset.source(TABLE).map(lambda row: row | {"more": 1})


def broken():
  class Gone(list):
    def __getitem__(self, number):
      raise OSError("shard 3 is gone")

  return Gone(range(30))


def unreachable():
  raise OSError("no network")


@pytest.mark.parametrize(
  ("make", "told"),
  [
    (broken, r"^broken\[\d+\] raised OSError: shard 3 is gone \(test_rows"),
    (unreachable, r"^unreachable raised OSError: no network \(test_rows\.py"),
  ],
)
def test_a_source_that_raises_is_told_with_its_row(make, told):
  with pytest.raises(ValueError, match=told):
    list(rows.Rows(data=make).known())


def test_a_pipeline_of_grain_is_a_source():
  data = rows.Rows(data=of_grain, eval_every=5)
  both = ids(data, "train") + ids(data, "eval")
  assert sorted(both) == list(range(60))
  assert data.record(3, "train").fields["more"] == 1


@pytest.mark.parametrize(
  ("lines", "told"),
  [
    (['{"id": 1}', "{oops"], "data.jsonl:2 is not JSON: Expecting property"),
    (['{"id": 1}', "[1]"], "data.jsonl:2 is list; a row must be a JSON object"),
    (["[" * 100_000], "data.jsonl:1 is not JSON"),
    ([], "data.jsonl is empty$"),
    (['{"id": 1}'], "none of its 1 rows is for (eval|train).*or eval_data"),
  ],
)
def test_a_file_that_is_wrong_is_told_with_its_line(file, lines, told):
  with pytest.raises(ValueError, match=told):
    list(rows.Rows(data=file(lines)).known())


def test_bytes_that_are_no_text_are_told_with_their_line(tmp_path):
  path = tmp_path / "data.jsonl"
  path.write_bytes(b'{"id": 1}\n{"id": "\xff"}\n')
  told = r"data.jsonl:2 is not UTF-8: its byte 8 is 0xff; save the file as"
  with pytest.raises(ValueError, match=told):
    list(rows.Rows(data=str(path)).known())


def test_an_empty_file_for_evaluation_is_named(file):
  data = rows.Rows(data=file(TABLE), eval_data=file([], "held_out.jsonl"))
  with pytest.raises(ValueError, match=r"held_out.jsonl is empty"):
    data.number(0, "train")


@pytest.mark.parametrize("name", ["gone.jsonl", "gone.parquet"])
def test_a_file_that_is_not_there_is_named(tmp_path, name):
  data = rows.Rows(data=str(tmp_path / name))
  with pytest.raises(ValueError, match=rf"{name} cannot be read: .*No such"):
    data.number(0, "train")


def test_a_directory_or_no_parquet_in_place_of_a_file_is_named(tmp_path):
  os.mkdir(tmp_path / "data.jsonl")
  with pytest.raises(ValueError, match=r"data.jsonl cannot be read"):
    rows.Rows(data=str(tmp_path / "data.jsonl")).number(0, "train")
  (tmp_path / "data.parquet").write_text("{}")
  with pytest.raises(ValueError, match=r"data.parquet is no Parquet file"):
    rows.Rows(data=str(tmp_path / "data.parquet")).number(0, "train")


def test_a_missing_package_names_the_extra(file, monkeypatch):
  path = file(TABLE, "data.parquet")
  monkeypatch.setitem(sys.modules, "pyarrow", None)
  with pytest.raises(ValueError, match=r"twinmesh\[parquet\]"):
    rows.Rows(data=path).number(0, "train")


def no_rows():
  return 5


def of_numbers():
  return list(range(50))


def by_split():
  return {"train": [{"id": 0}], "test": [{"id": 1}]}


@pytest.mark.parametrize(
  ("make", "told"),
  [
    (no_rows, "no_rows returned int, which has no __len__"),
    (of_numbers, r"of_numbers\[\d+\] is int; a row must be a mapping"),
    (by_split, "by_split returned dict of train, test; return one of its val"),
  ],
)
def test_a_source_that_is_wrong_is_named(make, told):
  data = rows.Rows(data=make, eval_every=2)
  with pytest.raises(ValueError, match=told):
    list(data.known())


@pytest.mark.parametrize(
  ("settings", "told"),
  [
    ({"data": "a.csv"}, "a.csv must end in .jsonl or .parquet"),
    ({"data": [{"q": 1}]}, r"\[{'q': 1}\] must end in .*, or be a function"),
    ({"data": "a.jsonl", "eval_data": "b"}, "b must end in .jsonl or .parquet"),
    ({"data": "a.jsonl", "eval_every": 1}, "eval_every=1 must be at least 2"),
  ],
)
def test_wrong_settings_are_refused(settings, told):
  with pytest.raises(ValueError, match=told):
    rows.Rows(**settings)


def test_a_field_that_is_missing_or_null_is_named_with_its_line(file):
  path = file([{"id": 0}, {"id": None, "x": 1}])
  data = rows.Rows(data=path, eval_data=path)
  record = data.record(1, "train")
  with pytest.raises(ValueError, match=r"data.jsonl:2: null in field 'id', wh"):
    record.field("id", "prompt")
  with pytest.raises(ValueError, match=r"data.jsonl:2: no field 'y', which pr"):
    record.field("y", "prompt")


@pytest.mark.parametrize(
  ("value", "told"),
  [
    (5, "5 is no list of messages"),
    ([], "is no list of messages"),
    ([{"role": "bot", "content": "x"}], "is no message: it needs a role"),
    ([{"role": "user"}], "is no message"),
    (["x"], "'x' is no message"),
    ([{"role": ["user"], "content": "x"}], "is no message"),
    (
      [{"role": "assistant", "content": "", "function_call": {"name": "f"}}],
      "function_call=.* is not read here; use tool_calls",
    ),
    (
      [
        {
          "role": "assistant",
          "tool_calls": [{"name": "f", "arguments": '{"x": 1e999}'}],
        }
      ],
      "arguments of f cannot be written as JSON: Out of range float",
    ),
    (
      [{"role": "user", "content": "x", "train": False}],
      "train=False of a message is not read here; leave it out",
    ),
    (
      [{"role": "user", "content": [{"type": "image_url"}]}],
      "'image_url'} is no part of text",
    ),
    (
      [{"role": "user", "content": "x", "tool_calls": [{"name": "f"}]}],
      "tool_calls must be a list, of a message of the assistant",
    ),
    (
      [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "["}]}],
      "is no call of a tool",
    ),
    ([{"role": "tool", "content": "x", "name": 5}], "name=5 of a message must"),
    (
      [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
      "its last message is of the assistant",
    ),
  ],
)
def test_a_conversation_that_is_none_is_named(value, told):
  record = rows.Record("data.jsonl:4", {"chat": value})
  with pytest.raises(ValueError, match=f"data.jsonl:4: field 'chat': .*{told}"):
    record.messages("chat", "messages")
