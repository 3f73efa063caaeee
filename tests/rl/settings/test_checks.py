"""Checks that look through a whole tree of settings."""

import dataclasses
import re
from typing import Any, TypedDict

import numpy as np
import pytest

from rl.settings import checks
from tests.helpers.setting_tree import (
  Clipped,
  Kinds,
  Pool,
  Tree,
  number_of,
  pool_of,
)


@dataclasses.dataclass(frozen=True)
class Optional:
  package: str

  def validate_installed(self):
    raise ValueError(f"{self.package} is not installed")


@dataclasses.dataclass(frozen=True)
class Parts:
  parts: tuple[object, ...]


@dataclasses.dataclass(frozen=True)
class Rate:
  peak: float

  validate = checks.fields((checks.above, 0, "peak"))


@dataclasses.dataclass(frozen=True)
class Table:
  short_name = "rate"
  file: str

  def validate(self):
    raise ValueError(f"{self.file}:1: no object")


@dataclasses.dataclass(frozen=True)
class Owner:
  first: object
  second: object = None


def test_a_value_out_of_bounds_is_named_by_its_path():
  checks.validate(Owner(Rate(1.0), Owner(Rate(1.0))))
  with pytest.raises(
    ValueError, match=r"^second\.first\.peak=0\.0 must be abo"
  ):
    checks.validate(Owner(Rate(1.0), Owner(Rate(0.0))))
  with pytest.raises(ValueError, match=r"^rate\.peak=0\.0 must be above 0$"):
    checks.validate(Rate(0.0))


COUNT: Any = {"count": "3"}
MODE: Any = {"mode": "drian"}


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"loss": Clipped}, "run.loss=Clipped is a class; write Clipped(...)"),
    (
      {"loss": float},
      "run.loss=float is a class, and no frozen dataclass; expected Loss",
    ),
    ({"pool": pool_of}, "run.pool=pool_of is a function; write pool_of(...)"),
    ({"pool": number_of}, "run.pool=number_of: expected Pool | none"),
    (
      {"loss": "plain"},
      "run.loss='plain': expected Loss; in Python write "
      "tests.helpers.setting_tree.Plain(...)",
    ),
    ({"loss": "plane"}, "run.loss='plane': expected Loss"),
    ({"pool": (2, "v5e")}, "run.pool=(2, 'v5e'): expected Pool | none"),
    ({"pools": "v5e"}, "run.pools='v5e': expected tuple[Pool, ...]"),
    ({"pools": (Pool,)}, "run.pools.0=Pool is a class; write Pool(...)"),
    ({"pools": (Pool(), 2)}, "run.pools.1=2: expected Pool"),
    ({"kinds": Kinds(**COUNT)}, "run.kinds.count='3': expected int"),
    (
      {"kinds": Kinds(**MODE)},
      "run.kinds.mode='drian': expected drain | recompute | 3",
    ),
    ({"group_size": 2.5}, "run.group_size=2.5: expected int"),
  ],
)
def test_a_value_of_another_kind_is_named_before_it_is_used(changes, message):
  given: Any = {"rate": np.float32(1), "count": np.int64(2), "mode": 3}
  tree = Tree(kinds=Kinds(**given))
  checks.validate_parts(tree, "run")
  with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
    checks.validate_parts(dataclasses.replace(tree, **changes), "run")


def test_a_default_needs_no_right_annotation():
  limited = dataclasses.make_dataclass("Limited", [("limit", int, None)])
  checks.validate_parts(limited())
  with pytest.raises(ValueError, match=r"^limit='5': expected int$"):
    checks.validate_parts(limited("5"))


class Row(TypedDict):
  question: str


@pytest.mark.parametrize(
  ("hint", "value"), [(Any, 3), (Row, {"question": "1 + 1"})]
)
def test_an_annotation_without_instances_takes_its_values(hint, value):
  part = dataclasses.make_dataclass("Part", [("given", hint)])
  checks.validate_parts(part(value))


def test_a_file_called_as_a_part_keeps_its_name():
  with pytest.raises(ValueError, match=r"^rate\.jsonl:1: no object$"):
    checks.validate(Owner(Table("rate.jsonl")))


@pytest.mark.parametrize(
  ("whole", "count", "use"),
  # 10**18 + 9 is prime: the search is bounded.
  [(16, 7, 4), (16, 12, 8), (16, 99, 16), (7, 6, 1), (10**18 + 9, 10**17, 1)],
)
def test_the_largest_divisor_that_is_not_above_is_proposed(whole, count, use):
  with pytest.raises(ValueError, match=rf"divide it; use {use}$"):
    checks.divides(Rate(count), whole, "it", "peak")


def test_a_missing_package_is_found_wherever_it_is_needed():
  checks.validate_installed(Parts((1, "a", Parts(()))))
  with pytest.raises(ValueError, match="x is not installed"):
    checks.validate_installed(Parts((Parts(()), Parts((Optional("x"),)))))
