"""Command-line text, read as the type of its field."""

import dataclasses
import re

import pytest

from rl.settings import overrides, parsing
from tests.helpers import setting_tree
from tests.helpers.setting_tree import Clipped, Color, Kinds, Plain, Pool, Tree

HERE = setting_tree.__name__
UNNAMED = "a value lacks its name; write NAME=VALUE, or {NAME: VALUE}"


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
    ("names", "'2x2','/a b'", ("2x2", "/a b")),
    ("numbers", "2,", (2,)),
    ("numbers", " ( 2 , 4 ) ", (2, 4)),
    ("numbers", "(2)", (2,)),
    ("names", "['it\\'s', a.B()+1]", ("it's", "a.B()+1")),
    ("nested", "((1,2),(3,))", ((1, 2), (3,))),
    ("listed", "[1,2]", [1, 2]),
    ("mesh", '{"data":2}', {"data": 2}),
    ("mesh", "{data: 2, model: 4,}", {"data": 2, "model": 4}),
    ("mesh", "{}", {}),
    ("by_color", "{BLUE: (1, 2)}", {Color.BLUE: (1, 2)}),
  ],
)
def test_text_is_read_as_the_type_of_the_field(field, text, value):
  tree = overrides.override(Tree(), f"kinds.{field}", text)
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
    ("mode", "dran", "drain | recompute | 3; did you mean drain?"),
    ("color", "blu", "RED | BLUE; did you mean BLUE?"),
    ("names", "", "a value is missing; expected Sequence[str]"),
    ("numbers", "2,,4", "invalid syntax; text with other signs needs quotes;"),
    ("numbers", "(2", "'(' was never closed; text with other signs needs quo"),
    (
      "names",
      "2x2",
      "invalid decimal literal; text with other signs needs quo",
    ),
    ("mesh", "{**x}", f"{UNNAMED}; expected Mapping[str, int]"),
    ("limit", "", "int | none"),
    ("numbers", "2,x", "tuple[int, ...]"),
    ("pair", "1,b,c", "tuple[int, str]"),
    ("mesh", "data", "Mapping[str, int]"),
    ("mesh", "{data: x}", "Mapping[str, int]"),
  ],
)
def test_text_of_another_type_is_refused_with_key_and_type(
  field, text, expected
):
  with pytest.raises(overrides.SettingError) as error:
    overrides.override(Tree(), f"kinds.{field}", text)
  if "; " not in expected or "did you mean" in expected:
    expected = f"expected {expected}"
  assert str(error.value).startswith(
    f"--config.kinds.{field}={text}: {expected}"
  )


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
    ("pool", "pool_of(kind=v5p, chips=2)", Pool(chips=2, name="v5p")),
    ("pool", "pool_of(kind='v5p',)", Pool(name="v5p")),
    ("pool", "Pool(name='a.b(c=1,)')", Pool(name="a.b(c=1,)")),
    ("pools", "Pool(chips=3)", (Pool(chips=3),)),
    ("pools.1", "Pool(chips=3)", Pool(chips=3)),
  ],
)
def test_object_is_replaced_by_its_class_and_arguments(path, text, value):
  tree = overrides.override(Tree(), path, f"{HERE}.{text}")
  # The short name says the same.
  short = re.sub(r"^[A-Z]\w+", lambda name: name[0].lower(), text)
  if path != "call":
    assert overrides.override(Tree(), path, short) == tree
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
      ", or set a part of it: --config.loss.scale (float),"
      " --config.loss.bounds (tuple[float, float])",
    ),
    (
      "loss",
      "3",
      "--config.loss=3: expected Loss, such as clipped, plain(scale=1.0)",
    ),
    (
      "pool",
      "3",
      "--config.pool=3: expected Pool | none, such as pool, pool_of(kind=v5e)",
    ),
    ("loss", "@Thawed", "--config.loss: @Thawed must be a frozen dataclass"),
    ("loss", "os.getcwd()", "os.getcwd must be a frozen dataclass"),
    ("loss", "@Nope()", "--config.loss: cannot import @Nope: module"),
    ("loss", "nope.Nope()", "--config.loss: cannot import nope.Nope: No mod"),
    ("loss", "@Uncallable()", "expected Loss"),
    ("call", "@Uncallable()", "expected Callable[[float], float]"),
    ("either", "@Plain(scale=1)", "expected Clipped | Pool"),
    (
      "loss",
      "clipped(2)",
      f"clipped(2): {UNNAMED}; expected Loss; clipped takes scale (float), ",
    ),
    ("loss", "clipped(**x)", f"clipped(**x): {UNNAMED}; expected Loss"),
    ("loss", "clipped(scale=2", "'(' was never closed; text with other signs"),
    ("loss", "clipped(scale=)", "text with other signs needs quotes; expected"),
    ("pool", "pool(name=1.7b)", "put 1.7b in quotes: name='1.7b'; expected"),
    ("pool", "pool(name=/a/b)", "put /a/b in quotes: name='/a/b'; expected"),
    ("loss", "a:B", "--config.loss=a:B: write a.B; expected Loss"),
    ("pool", "a:B(c='d:e')", "write a.B(c='d:e'); expected Pool | none"),
    ("loss", "xy()", "nothing here is called xy; there are clipped, plain("),
    ("loss", "os.xy()", "has no attribute 'xy'; there are clipped, plain("),
    (
      "loss",
      "Clipped()",
      "nothing here is called Clipped; did you mean cli",
    ),
    ("loss", "clippd", "expected Loss; did you mean clipped? There are clip"),
    ("loss", "@Cliped()", "; did you mean clipped? There are clipped, plain"),
    ("loss", "old.Clipped()", f"did you mean clipped ({HERE}.Clipped)? There"),
    ("pool", "@pool_of()", "--config.pool: needs kind, as in pool_of(kind=v"),
    ("pool", "@pool_of(kind=x)", "--config.pool.kind=x: expected v5e | v5p"),
    ("pool", "@pool_of(kind=v5e,chip=1)", "pool_of has no such field; did you"),
    ("pool", "@pool_of(kind=v5e,chips=3)", "config.pool: chips=3 make no pool"),
    ("pool", "@number_of()", "or a function with one as its return"),
    ("loss", "@Clipped(scale=x)", "--config.loss.scale=x: expected float"),
    ("loss", "@Clipped(scael=2)", "no such field; did you mean scale?"),
    ("loss", "@Bare(n=3)", "loss.n: bare has no such field; it has none"),
    ("loss", "@Plain()", "--config.loss: needs scale, as in plain(scale=1.0)"),
    (
      "loss",
      "@Clipped(scale=0)",
      "--config.loss: scale=0.0 must be positive",
    ),
    ("loss.scale", "-1", "--config.loss.scale=-1: scale=-1.0 must be positive"),
  ],
)
def test_object_that_cannot_be_built_is_refused(path, text, reason):
  with pytest.raises(overrides.SettingError) as error:
    overrides.override(Tree(), path, text.replace("@", f"{HERE}."))
  assert reason.replace("@", f"{HERE}.") in str(error.value)


@pytest.mark.parametrize(
  ("text", "path", "expected"),
  [
    ("clipped(low=0.1)", "low", True),
    ("clipped(low=0.1)", "high", False),
    ("clipped", "low", False),
    ("tree(loss=clipped(low=0.1))", "loss.low", True),
    ("tree(loss=clipped(low=0.1))", "loss.high", False),
    ("{'low': 0.1}", "low", True),
    ("[clipped(low=0.1), clipped]", "0.low", True),
    ("[clipped(low=0.1), clipped]", "1.low", False),
    ("", "low", False),
  ],
)
def test_a_text_sets_what_it_gives_a_value_to(text, path, expected):
  assert parsing.sets(text, path) is expected
