"""Overrides, JSON and error messages of a tree of frozen dataclasses."""

import dataclasses
import enum
import json
import subprocess
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

import pytest

from rl import settings


class Color(enum.Enum):
  RED = "rot"
  BLUE = 2


Steps = typing.NewType("Steps", int)


class Loss(Protocol):
  @property
  def scale(self) -> float: ...

  def __call__(self, x: float) -> float: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clipped:
  scale: float = 1.0
  bounds: tuple[float, float] = (0.2, 0.28)

  def __post_init__(self):
    if self.scale <= 0:
      raise ValueError(f"scale={self.scale} must be positive")

  def __call__(self, x: float) -> float:
    return min(x, self.bounds[1]) * self.scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plain:
  scale: float

  def __call__(self, x: float) -> float:
    return x * self.scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uncallable:
  scale: float = 1.0


@dataclasses.dataclass
class Thawed:
  scale: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pool:
  chips: int = 1
  name: str = "v5e"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kinds:
  flag: bool = False
  count: int = 1
  steps: Steps = Steps(1)
  rate: float = 0.5
  word: str = "a"
  color: Color = Color.RED
  mode: Literal["drain", "recompute", 3] = "drain"
  limit: int | None = 7
  late: str | None = "x"
  mixed: str | int | float = 1
  numbers: tuple[int, ...] = ()
  pair: tuple[int, str] = (1, "a")
  names: Sequence[str] = ("a",)
  nested: tuple[tuple[int, ...], ...] = ((1,),)
  listed: list[int] = dataclasses.field(default_factory=list)
  mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
  by_color: Mapping[Color, tuple[int, ...]] = dataclasses.field(
    default_factory=dict
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tree:
  kinds: Kinds = Kinds()
  loss: Loss = Clipped()
  call: Callable[[float], float] = Plain(scale=2.0)
  either: Clipped | Pool = Pool()
  rate: float | Clipped = 0.1
  pool: Pool | None = None
  pools: tuple[Pool, ...] = (Pool(), Pool(chips=4, name="v5p"))
  group_size: int = 8


HERE = Tree.__module__


@pytest.mark.parametrize(
  ("field", "text", "value"),
  [
    ("flag", "true", True),
    ("flag", "False", False),
    ("flag", "1", True),
    ("count", "1_000", 1000),
    ("count", "1e3", 1000),
    # 2**53 + 1 has no float: it must not pass through one.
    ("count", "9007199254740993", 9007199254740993),
    ("steps", "3", 3),
    ("rate", "3", 3.0),
    ("rate", "1e-5", 1e-5),
    ("word", "a, (b", "a, (b"),
    ("word", "", ""),
    ("color", "rot", Color.RED),
    ("color", "BLUE", Color.BLUE),
    ("color", "2", Color.BLUE),
    ("mode", "recompute", "recompute"),
    ("mode", "3", 3),
    ("limit", "none", None),
    ("limit", "9", 9),
    ("late", "None", None),
    ("late", "b", "b"),
    ("mixed", "2", 2),
    ("mixed", "2.5", 2.5),
    ("mixed", "two", "two"),
    ("numbers", "2,4", (2, 4)),
    ("numbers", "(2, 1e3)", (2, 1000)),
    ("numbers", "[2]", (2,)),
    ("numbers", "2", (2,)),
    ("numbers", "()", ()),
    ("pair", "3,b", (3, "b")),
    ("pair", "(3, 'b, c')", (3, "b, c")),
    ("names", '"2x2"', ("2x2",)),
    ("names", "a.b", ("a.b",)),
    ("names", "a.b,c-d", ("a.b", "c-d")),
    ("nested", "((1,2),(3,))", ((1, 2), (3,))),
    ("listed", "[1,2]", [1, 2]),
    ("mesh", '{"data":2}', {"data": 2}),
    ("mesh", "{data: 2, model: 4}", {"data": 2, "model": 4}),
    ("mesh", "{}", {}),
    ("by_color", "{BLUE: (1, 2)}", {Color.BLUE: (1, 2)}),
  ],
)
def test_text_is_read_as_the_type_of_the_field(field, text, value):
  tree = settings.override(Tree(), f"kinds.{field}", text)
  read = getattr(tree.kinds, field)
  assert read == value
  assert type(read) is type(value)
  # The rest of the tree is as it was.
  assert tree == Tree(kinds=dataclasses.replace(Kinds(), **{field: value}))


@pytest.mark.parametrize(
  ("field", "text", "expected"),
  [
    ("flag", "yes", "bool"),
    ("count", "1.5", "int"),
    ("count", "inf", "int"),
    ("rate", "abc", "float"),
    ("color", "green", "RED | BLUE"),
    ("mode", "keep", "drain | recompute | 3"),
    ("limit", "", "int | none"),
    ("numbers", "2,x", "tuple[int, ...]"),
    ("numbers", "2,,4", "tuple[int, ...]"),
    ("pair", "1,b,c", "tuple[int, str]"),
    ("names", "2x2,4", "Sequence[str]"),
    ("mesh", "data", "Mapping[str, int]"),
    ("mesh", "{data: x}", "Mapping[str, int]"),
    ("mesh", "{**x}", "Mapping[str, int]"),
  ],
)
def test_text_of_another_type_is_refused_with_key_and_type(
  field, text, expected
):
  with pytest.raises(settings.SettingError) as error:
    settings.override(Tree(), f"kinds.{field}", text)
  assert str(error.value) == (
    f"--config.kinds.{field}={text}: expected {expected}"
  )


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
  with pytest.raises(settings.SettingError) as error:
    settings.override(Tree(), path, "1")
  assert str(error.value) == (
    f"--config.{path}: no such setting; did you mean --config.{near}?"
  )


@pytest.mark.parametrize(
  ("path", "reason"),
  [
    ("pools.0.zzz", "no such setting; there are chips, name"),
    ("group_size.x", "--config.group_size is one value (int)"),
    ("pool.chips", "--config.pool is none, so nothing below it can be set"),
  ],
)
def test_path_that_leads_nowhere_says_why(path, reason):
  with pytest.raises(settings.SettingError) as error:
    settings.override(Tree(), path, "1")
  assert str(error.value).startswith(f"--config.{path}: {reason}")


@pytest.mark.parametrize(
  ("path", "text", "value"),
  [
    ("loss", "Clipped", Clipped()),
    (
      "loss",
      "Clipped(scale=2, bounds=(0.1, 1))",
      Clipped(scale=2.0, bounds=(0.1, 1.0)),
    ),
    ("loss", "Plain(scale=1e-3)", Plain(scale=1e-3)),
    ("call", "Clipped()", Clipped()),
    ("either", "Clipped()", Clipped()),
    ("rate", "Clipped()", Clipped()),
    ("pool", "Pool(name='big one')", Pool(name="big one")),
    ("pools", "Pool(chips=3)", (Pool(chips=3),)),
    ("pools.1", "Pool(chips=3)", Pool(chips=3)),
  ],
)
def test_object_is_replaced_by_its_class_and_arguments(path, text, value):
  tree = settings.override(Tree(), path, f"{HERE}.{text}")
  if path == "pools.1":
    assert tree == Tree(pools=(Pool(), value))
  else:
    assert tree == dataclasses.replace(Tree(), **{path: value})


@pytest.mark.parametrize(
  ("path", "text", "reason"),
  [
    (
      "loss",
      "3",
      "--config.loss=3: expected Loss, or set a part of it:"
      " --config.loss.scale (float),"
      " --config.loss.bounds (tuple[float, float])",
    ),
    ("pool", "3", "--config.pool=3: expected Pool | none"),
    ("loss", "@Thawed", "--config.loss: @Thawed is no frozen dataclass"),
    ("loss", "os.getcwd()", "--config.loss: os.getcwd is no frozen dataclass"),
    ("loss", "@Nope()", "--config.loss: cannot import @Nope: module"),
    ("loss", "nope.Nope()", "--config.loss: cannot import nope.Nope: No mod"),
    ("loss", "@Uncallable()", "expected Loss"),
    ("call", "@Uncallable()", "expected Callable[[float], float]"),
    ("either", "@Plain(scale=1)", "expected Clipped | Pool"),
    ("loss", "@Clipped(2)", "write package.Class(field=value)"),
    ("loss", "@Clipped(**x)", "@Clipped has no such field"),
    ("loss", "Clipped()", "write package.Class(field=value)"),
    ("loss", "@Clipped(scale=x)", "--config.loss.scale=x: expected float"),
    ("loss", "@Clipped(scael=2)", "no such field; did you mean scale?"),
    ("loss", "@Plain()", "missing 1 required keyword-only argument: 'scale'"),
    (
      "loss",
      "@Clipped(scale=0)",
      "--config.loss: scale=0.0 must be positive",
    ),
    ("loss.scale", "-1", "--config.loss.scale=-1: scale=-1.0 must be positive"),
  ],
)
def test_object_that_cannot_be_built_is_refused(path, text, reason):
  with pytest.raises(settings.SettingError) as error:
    settings.override(Tree(), path, text.replace("@", f"{HERE}."))
  assert reason.replace("@", f"{HERE}.") in str(error.value)


def test_optional_part_can_be_made_none():
  tree = settings.override(Tree(pool=Pool()), "pool", "none")
  assert tree.pool is None


def test_item_of_a_tuple_is_reached_by_its_number():
  tree = settings.override(Tree(), "pools.1.chips", "2")
  assert tree.pools == (Pool(), Pool(chips=2, name="v5p"))


def test_leaves_have_type_and_value_by_path():
  leaves = settings.leaves(Tree())
  assert leaves["kinds.limit"] == ("int | none", 7)
  assert leaves["loss.bounds"] == ("tuple[float, float]", (0.2, 0.28))
  assert leaves["pools.1.name"] == ("str", "v5p")
  assert leaves["pool"] == ("Pool | none", None)
  assert "loss" not in leaves


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
  data = settings.to_json(tree)
  assert data["loss"] == {"class": f"{HERE}.Plain", "scale": 3.0}
  again = settings.from_json(json.loads(json.dumps(data)))
  assert again == tree
  # "2" equals no int: the string came back as a string.
  assert again.kinds.mixed == "2"


@pytest.mark.parametrize(
  ("change", "reason"),
  [
    ({"gruop_size": 1}, "config.gruop_size: @Tree has no such field"),
    ({"gruop_size": 1}, "did you mean group_size?"),
    ({"group_size": "8"}, "config.group_size='8': expected int"),
    ({"group_size": True}, "config.group_size=True: expected int"),
    ({"group_size": 8.0}, "config.group_size=8.0: expected int"),
    ({"loss": 3}, "config.loss=3: expected Loss"),
    ({"loss": {"class": "@Plain"}}, "config.loss: Plain.__init__() missing"),
    ({"loss": {"class": "@Thawed"}}, "@Thawed is no frozen dataclass"),
    ({"loss": {"class": "@Gone"}}, "config.loss: cannot import @Gone"),
    (
      {"pools": [{"class": "@Pool", "chips": "x"}]},
      "config.pools.0.chips='x': expected int",
    ),
    ({"pools": 3}, "config.pools=3: expected tuple[Pool, ...]"),
  ],
)
def test_json_that_does_not_fit_names_the_field(change, reason):
  data = settings.to_json(Tree()) | change
  data = json.loads(json.dumps(data).replace("@", f"{HERE}."))
  with pytest.raises(settings.SettingError) as error:
    settings.from_json(data)
  assert reason.replace("@", f"{HERE}.") in str(error.value)


@pytest.mark.parametrize("data", [[1], {"a": 1}, 3, None])
def test_json_without_a_class_is_refused(data):
  with pytest.raises(settings.SettingError, match=r"^config=.*: expected obj"):
    settings.from_json(data)


def test_fields_missing_in_json_take_their_defaults():
  assert settings.from_json({"class": f"{HERE}.Tree"}) == Tree()


def test_function_is_refused_as_a_setting():
  with pytest.raises(settings.SettingError, match=r"^config.call: <built-in"):
    settings.to_json(Tree(call=abs))


def test_difference_has_a_line_for_each_changed_setting():
  after = Tree(
    group_size=16,
    kinds=Kinds(word="b"),
    loss=Plain(scale=1.0),
    pools=(Pool(chips=2), Pool(chips=4, name="v5p")),
  )
  assert settings.difference(Tree(), after) == [
    "kinds.word: 'a' -> 'b'",
    "loss: Clipped(scale=1.0, bounds=(0.2, 0.28)) -> Plain(scale=1.0)",
    "pools.0.chips: 1 -> 2",
    "group_size: 8 -> 16",
  ]
  assert settings.difference(after, after) == []


def test_number_of_items_is_one_difference():
  lines = settings.difference(Tree(), Tree(pools=()))
  assert len(lines) == 1
  assert lines[0].startswith("pools: (Pool(")


def test_settings_are_read_without_jax():
  code = "import sys, rl.settings; assert 'jax' not in sys.modules"
  subprocess.run([sys.executable, "-c", code], check=True)
