"""A tree of settings with every kind of field."""

import dataclasses
import enum
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bare:
  pass


@dataclasses.dataclass
class Thawed:
  scale: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pool:
  chips: int = 1
  name: str = "v5e"


def pool_of(kind: Literal["v5e", "v5p"], **overrides: Any) -> Pool:
  if overrides.get("chips") == 3:
    raise ValueError("chips=3 make no pool")
  return Pool(name=kind, **overrides)


def number_of() -> int:
  return 3


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
class Loose:
  limit: int = None  # pyright: ignore[reportAssignmentType]
  some: Any = 0
  table: dict = dataclasses.field(default_factory=dict)


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
