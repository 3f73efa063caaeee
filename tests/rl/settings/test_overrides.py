"""Overrides and JSON of a tree of frozen dataclasses."""

import dataclasses
import json
import math
import subprocess
import sys
import typing

import pytest

from rl.settings import overrides
from tests.helpers import setting_tree
from tests.helpers.setting_tree import (
  Clipped,
  Color,
  Kinds,
  Loose,
  Plain,
  Pool,
  Tree,
)

HERE = setting_tree.__name__


@pytest.mark.parametrize(
  ("path", "near"),
  [
    ("gruop_size", "group_size (int)"),
    ("kinds.cuont", "kinds.count (int)"),
    ("kinds.group_size", "group_size (int)"),
    ("color", "kinds.color (RED | BLUE)"),
    ("loss.bound", "loss.bounds (tuple[float, float])"),
    ("pools.1.chip", "pools.1.chips (int)"),
    ("los", "loss (Loss)"),
  ],
)
def test_unknown_key_names_the_nearest_of_the_whole_tree(path, near):
  with pytest.raises(overrides.SettingError) as error:
    overrides.override(Tree(), path, "1")
  assert str(error.value) == (
    f"--config.{path}: no such setting; did you mean --config.{near}?"
  )


@pytest.mark.parametrize(
  ("path", "reason"),
  [
    ("pools.0.zzz", "no such setting; there are chips, name"),
    ("group_size.x", "--config.group_size is one value (int)"),
    (
      "pool.chips",
      "--config.pool is none, so nothing below it can be set; make it an object"
      " in the file or with --config.pool=pool",
    ),
  ],
)
def test_path_that_leads_nowhere_says_why(path, reason):
  with pytest.raises(overrides.SettingError) as error:
    overrides.override(Tree(), path, "1")
  assert str(error.value).startswith(f"--config.{path}: {reason}")


def test_optional_part_can_be_made_none():
  tree = overrides.override(Tree(pool=Pool()), "pool", "none")
  assert tree.pool is None


@pytest.mark.parametrize(
  ("path", "tree"),
  [
    ("kinds.flag", Tree(kinds=Kinds(flag=False), pool=Pool())),
    ("kinds.limit", Tree(kinds=Kinds(flag=True, limit=None), pool=Pool())),
    # Not the word "false", although any word is a str.
    ("kinds.late", Tree(kinds=Kinds(flag=True, late=None), pool=Pool())),
    ("pool", Tree(kinds=Kinds(flag=True))),
  ],
)
def test_a_setting_is_turned_off_by_false_or_none(path, tree):
  on = Tree(kinds=Kinds(flag=True), pool=Pool())
  assert overrides.override(on, path, None) == tree


@pytest.mark.parametrize(
  ("path", "words"),
  [("kinds.word", "str"), ("kinds.count", "int"), ("loss", "Loss")],
)
def test_a_setting_that_is_neither_cannot_be_turned_off(path, words):
  with pytest.raises(overrides.SettingError) as error:
    overrides.override(Tree(), path, None)
  assert str(error.value) == (
    f"--noconfig.{path}: {words} cannot be turned off; give it a value"
  )


@pytest.mark.parametrize("order", [1, -1])
def test_parts_come_before_what_lies_in_them(order):
  changes = {
    "pools.0.chips": "2",
    "loss.scale": "3",
    "pools": f"{HERE}.Pool(name=a)",
    "loss": f"{HERE}.Plain(scale=1)",
    "pool": None,
  }
  changes = dict(list(changes.items())[::order])
  tree = overrides.apply(Tree(pool=Pool()), changes)
  assert tree == Tree(loss=Plain(scale=3.0), pools=(Pool(chips=2, name="a"),))


@dataclasses.dataclass(frozen=True)
class Span:
  low: int = 1
  high: int = 20

  def __post_init__(self):
    if self.low >= self.high:
      raise ValueError(f"low={self.low} is not below high={self.high}")


@pytest.mark.parametrize("order", [1, -1])
def test_settings_that_a_part_compares_change_together(order):
  changes = dict([("low", "50"), ("high", "60")][::order])
  assert overrides.apply(Span(), changes) == Span(low=50, high=60)
  with pytest.raises(overrides.SettingError) as error:
    overrides.apply(Span(), {"low": "50", "high": "40"})
  assert str(error.value) == (
    "--config.low=50 --config.high=40: low=50 is not below high=40"
  )


def test_item_of_a_tuple_is_reached_by_its_number():
  tree = overrides.override(Tree(), "pools.1.chips", "2")
  assert tree.pools == (Pool(), Pool(chips=2, name="v5p"))


def test_json_makes_an_equal_tree():
  tree = Tree(
    kinds=Kinds(
      flag=True,
      rate=float("inf"),
      color=Color.BLUE,
      mode=3,
      limit=None,
      mixed="2",
      numbers=(1, 2),
      listed=[3],
      mesh={"data": 2},
      by_color={Color.RED: (1,)},
    ),
    loss=Plain(scale=3.0),
    either=Clipped(),
    rate=Clipped(scale=2.0),
    pool=Pool(),
  )
  data = overrides.to_json(tree)
  assert data["loss"] == {"class": f"{HERE}.Plain", "scale": 3.0}
  again = overrides.from_json(json.loads(json.dumps(data)))
  assert again == tree
  # "2" equals no int: the string came back as a string.
  assert again.kinds.mixed == "2"


@pytest.mark.parametrize(
  ("change", "reason"),
  [
    ({"gruop_size": 1}, "config.gruop_size: tree has no such field"),
    ({"gruop_size": 1}, "did you mean group_size?"),
    ({"zzz": 1}, "no such field; it has kinds, loss, call, either, rate"),
    ({"group_size": "8"}, "config.group_size='8': expected int"),
    ({"group_size": True}, "config.group_size=True: expected int"),
    ({"group_size": 8.0}, "config.group_size=8.0: expected int"),
    ({"loss": 3}, "config.loss=3: expected Loss"),
    (
      {"loss": {"class": "@Plain"}},
      "config.loss: needs scale, as in plain(scale=1.0)",
    ),
    ({"loss": {"class": "@Thawed"}}, "@Thawed must be a frozen dataclass"),
    ({"loss": {"class": "@Gone"}}, "config.loss: cannot import @Gone"),
    (
      {"loss": {"class": "tests.old.Plain"}},
      "tests.old.Plain: module 'tests' has no attribute 'old'; did you mean "
      "plain(scale=1.0) (@Plain)?",
    ),
    (
      {"class": "tests.old.Tree"},
      "config: cannot import tests.old.Tree: module 'tests' has no attribute "
      "'old'; did you mean @Tree?",
    ),
    (
      {"pools": [{"class": "@Pool", "chips": "x"}]},
      "config.pools.0.chips='x': expected int",
    ),
    ({"pools": 3}, "config.pools=3: expected tuple[Pool, ...]"),
  ],
)
def test_json_that_does_not_fit_names_the_field(change, reason):
  data = overrides.to_json(Tree()) | change
  data = json.loads(json.dumps(data).replace("@", f"{HERE}."))
  with pytest.raises(overrides.SettingError) as error:
    overrides.from_json(data)
  assert reason.replace("@", f"{HERE}.") in str(error.value)


@pytest.mark.parametrize("data", [[1], {"a": 1}, 3, None])
def test_json_without_a_class_is_refused(data):
  with pytest.raises(overrides.SettingError, match=r"^config=.*: expected obj"):
    overrides.from_json(data)


def test_fields_missing_in_json_take_their_defaults():
  assert overrides.from_json({"class": f"{HERE}.Tree"}) == Tree()


@pytest.mark.parametrize(
  "given",
  [
    Loose(),
    Loose(limit=3, some={"a": 1}),
    Loose(some=Pool(), table={"b": (1, {"c": None})}),
  ],
)
def test_json_of_loose_annotations_makes_an_equal_object(given):
  data = json.loads(json.dumps(overrides.to_json(given)))
  assert overrides.from_json(data) == given


@pytest.mark.parametrize("call", [abs, math.sqrt, setting_tree.number_of])
def test_a_function_is_a_setting_by_its_name(call):
  data = json.loads(json.dumps(overrides.to_json(Tree(call=call))))
  assert data["call"] == f"{call.__module__}:{call.__name__}"
  assert overrides.from_json(data).call is call
  text = f"'{data['call']}'"
  assert overrides.override(Tree(), "call", text).call is call


@pytest.mark.parametrize("call", [lambda x: x, Clipped().__call__])
def test_a_function_without_a_name_is_refused_as_a_setting(call):
  with pytest.raises(overrides.SettingError, match=r"^config.call: .* cannot"):
    overrides.to_json(Tree(call=call))


@pytest.mark.parametrize(
  ("name", "told"),
  [
    ("math:gone", "--config.call: cannot import math:gone"),
    ("nowhere:abs", "--config.call: cannot import nowhere:abs: No module"),
    ("math:pi", "--config.call: math:pi must be a function"),
    ("abs", "expected Callable[[float], float] as 'MODULE:NAME'"),
    ("math.sqrt", "--config.call=math.sqrt: write 'math:sqrt'; expected Calla"),
  ],
)
def test_a_name_without_a_function_is_refused(name, told):
  with pytest.raises(overrides.SettingError) as error:
    overrides.override(Tree(), "call", name)
  assert told in str(error.value)


def test_an_object_that_is_no_setting_is_refused():
  with pytest.raises(overrides.SettingError, match=r"^config.call: <object"):
    overrides.to_json(Tree(call=typing.cast(typing.Any, object())))


def test_difference_has_a_line_for_each_changed_setting():
  after = Tree(
    group_size=16,
    kinds=Kinds(word="b"),
    loss=Plain(scale=1.0),
    pools=(Pool(chips=2), Pool(chips=4, name="v5p")),
  )
  assert [*map(str, overrides.difference(Tree(), after))] == [
    "kinds.word: 'a' -> 'b'",
    "loss: Clipped(scale=1.0, bounds=(0.2, 0.28)) -> Plain(scale=1.0)",
    "pools.0.chips: 1 -> 2",
    "group_size: 8 -> 16",
  ]
  assert overrides.difference(after, after) == []


def test_number_of_items_is_one_difference():
  lines = [*map(str, overrides.difference(Tree(), Tree(pools=())))]
  assert len(lines) == 1
  assert lines[0].startswith("pools: (Pool(")


@pytest.mark.process
def test_settings_are_read_without_jax():
  code = "import sys, rl.settings.overrides; assert 'jax' not in sys.modules"
  subprocess.run([sys.executable, "-c", code], check=True)
