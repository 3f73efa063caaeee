"""Rewards: grades of finished episodes, based on their text alone.

Those that compare take the expected answer from `base.Task.answer` and the
given one from the content of the agent's last message, never from its
reasoning. They are 1 or 0; an empty or an overlong answer is 0.
"""

import asyncio
import dataclasses
import fractions
import functools
import json
import math
import os
import pathlib
import re
import unicodedata
from collections.abc import Sequence
from typing import Any, Literal

from envs import base, call_clock, extras, threads
from envs.rewards import answers, math_process

_MAX_MATH_CHARS = 1000
_TEXT = re.compile(r"\\(?:text|textbf|mathrm)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"(?:[^\W\d_]{3,}|[Nn][Oo])(?: [^\W\d_]+)*")
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\\,|\{,\})(?=[0-9]{3}(?![0-9]))")
_AS_LATEX = str.maketrans({"°": r"^\circ", "~": " "})
# The base 2 of 1010_2, which math-verify leaves out.
_BASE = re.compile(r"(?<!\^)[0-9]\s*_\s*\{?\s*(\w+)")
_FENCED = re.compile(r"```(?:json)?\s*\n(.*)\n\s*```", re.DOTALL)
# Of its own: hundreds of comparisons must not take the environments' threads.
_NUM_PROCESSES = min(4, os.cpu_count() or 1)
_MATH = threads.ThreadPool(size=_NUM_PROCESSES, max_size=_NUM_PROCESSES)
_PLACES = call_clock.LoopPlaces(_NUM_PROCESSES)


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The sum of the environment's step rewards, of which there must be one."""

  stateless = True

  async def __call__(
    self, task: base.Task, transcripts: Sequence[base.Transcript]
  ) -> Sequence[base.Grade]:
    """Returns one grade for each transcript, in order."""
    if not all(t.step_rewards for t in transcripts):
      raise ValueError(
        "the episode has no reward of its own; use a reward that reads the text"
      )
    return [
      base.Grade.single("outcome", sum(t.step_rewards)) for t in transcripts
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExactMatch:
  """1 if the answer is the expected text, up to white space.

  Attributes:
    find: where the answer stands, as in `envs.rewards.answers.Place`.
    marker: the text before the answer, where `find` is marker.
    ignore_case: capitals do not matter.
  """

  find: answers.Place = "whole"
  marker: str = "####"
  ignore_case: bool = False
  stateless = True

  def __post_init__(self) -> None:
    _check_marker(self.marker)

  def check_task(self, task: base.Task) -> None:
    """Raises ValueError on a task without an answer."""
    answers.reference(task)

  async def __call__(
    self, task: base.Task, transcripts: Sequence[base.Transcript]
  ) -> Sequence[base.Grade]:
    """Returns one grade for each transcript, in order."""
    expected = self._normal(answers.reference(task))
    found = _found(transcripts, self.find, self.marker)
    return [
      base.Grade.single(
        "exact_match", text is not None and self._normal(text) == expected
      )
      for text in found
    ]

  def _normal(self, text: str) -> str:
    text = " ".join(unicodedata.normalize("NFC", text).split())
    return text.casefold() if self.ignore_case else text


@dataclasses.dataclass(frozen=True, kw_only=True)
class NumericMatch:
  """1 if the answer is the expected number.

  Numbers are written as in 1,234.5, -3e-4, .5, 3/4, 3 1/2 or \\frac{3}{4}, in
  ASCII digits; signs of units, currencies and percent around them are ignored,
  and a minus counts before them: -$5 and x = - 5 are negative. They are
  compared exactly, however long, unless a tolerance is given.

  Attributes:
    find: number is the last number of the text; in the other places, as in
      `envs.rewards.answers.Place`, there must be no second number, nor an
      expression: 5!, \\sqrt{5} and x > 5 are not 5.
    marker: the text before the answer, where `find` is marker.
    relative, absolute: tolerances; the larger one counts.
  """

  find: Literal["number", "whole", "boxed", "marker"] = "number"
  marker: str = "####"
  relative: float = 0.0
  absolute: float = 0.0
  stateless = True

  def __post_init__(self) -> None:
    _check_marker(self.marker)
    if not 0 <= self.relative < 1:
      raise ValueError(
        f"relative={self.relative} must be in [0, 1): at 1 the answer 0 would "
        "always be right"
      )
    if not 0 <= self.absolute < math.inf:
      raise ValueError(f"absolute={self.absolute} must be finite and >= 0")

  def check_task(self, task: base.Task) -> None:
    """Raises ValueError on a task whose answer is not one number."""
    self._expected(task)

  async def __call__(
    self, task: base.Task, transcripts: Sequence[base.Transcript]
  ) -> Sequence[base.Grade]:
    """Returns one grade for each transcript, in order."""
    expected = self._expected(task)
    if self.find == "number":
      values = [answers.last_number(answers.last(t)) for t in transcripts]
    else:
      found = _found(transcripts, self.find, self.marker)
      values = [answers.number(text or "") for text in found]
    return [
      base.Grade.single("numeric_match", self._near(v, expected))
      for v in values
    ]

  def _expected(self, task: base.Task) -> fractions.Fraction:
    text = answers.reference(task)
    value = answers.number(text)
    if value is None:
      raise ValueError(
        f"task {task.id} has answer={text!r}, which must be one number; let "
        "its source give the final answer alone, or use another reward"
      )
    return value

  def _near(
    self, value: fractions.Fraction | None, expected: fractions.Fraction
  ) -> bool:
    if value is None:
      return False
    # By way of text: 0.3 as a float is a little less than 3/10.
    relative = fractions.Fraction(str(self.relative))
    absolute = fractions.Fraction(str(self.absolute))
    return abs(value - expected) <= max(absolute, relative * abs(expected))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MathMatch:
  """1 if the answer is an expression equal to the expected one, by math-verify.

  Both are LaTeX: `\\frac{1}{2}` equals 0.5, and (x+1)^2 equals x^2+2x+1.
  Numbers are compared to six decimals and to six significant digits, and their
  bases, as in 1010_2, must be the same. "No" and words of three letters or more
  are compared as text, as listen would equal silent.

  Some of what is equal may surprise: lists in any order, (1, 2) and the set
  {1, 2}, and a question and its answer. Where 12*7 must be worked out, use
  `NumericMatch`; where order counts, a list in brackets or `ExactMatch`.

  Attributes:
    find: where the answer stands, as in `envs.rewards.answers.Place`.
    marker: the text before the answer, where `find` is marker.
    cpu_s: seconds of the processor to compare; what takes longer is 0.
  """

  find: answers.Place = "boxed"
  marker: str = "####"
  cpu_s: float = 1.0
  stateless = True

  def __post_init__(self) -> None:
    _check_marker(self.marker)
    if not 0 < self.cpu_s <= 10:
      raise ValueError(f"cpu_s={self.cpu_s} must be above 0 and at most 10")
    extras.require("math_verify", "rewards", "reward math_match")

  def check_task(self, task: base.Task) -> None:
    """Raises ValueError on a task without an answer."""
    self._expected(task)

  async def __call__(
    self, task: base.Task, transcripts: Sequence[base.Transcript]
  ) -> Sequence[base.Grade]:
    """Returns one grade for each transcript, in order."""
    expected = self._expected(task)
    found = _found(transcripts, self.find, self.marker)
    equal = await asyncio.gather(*(self._equal(expected, t) for t in found))
    return [base.Grade.single("math_match", value) for value in equal]

  def _expected(self, task: base.Task) -> str:
    text = answers.reference(task)
    if len(text) > _MAX_MATH_CHARS:
      raise ValueError(
        f"task {task.id} has an answer of {len(text)} characters; the most "
        f"that is compared is {_MAX_MATH_CHARS}"
      )
    return _unwrapped(text)

  async def _equal(self, expected: str, text: str | None) -> bool:
    text = _unwrapped(text or "")
    if not text or len(text) > _MAX_MATH_CHARS:
      return False
    if _WORDS.fullmatch(expected):
      return text.casefold() == expected.casefold()
    if _BASE.findall(text) != _BASE.findall(expected):
      return False
    async with _PLACES.place():
      return await _MATH.call(math_process.equal, expected, text, self.cpu_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonSchema:
  """1 if the answer is JSON, bare or in one fence, that a schema allows.

  It grades form alone, so combine it with another reward. Repeated keys and
  numbers that are not finite are no JSON. References to other documents are
  not followed.

  Attributes:
    schema: JSON text that begins with {, or the path of a file that holds it.
      It must not allow empty values, which an agent would soon find.
  """

  schema: str
  stateless = True

  def __post_init__(self) -> None:
    extras.require("jsonschema", "rewards", "reward json_schema")
    validator = _validator(self.schema)
    for empty in (None, {}, [], ""):
      if validator.is_valid(empty):
        raise ValueError(
          f"schema={self.schema[:80]!r} allows {json.dumps(empty)}, so an "
          "agent would learn to say only that; give it a type, required "
          "properties, minItems or minLength"
        )

  async def __call__(
    self, task: base.Task, transcripts: Sequence[base.Transcript]
  ) -> Sequence[base.Grade]:
    """Returns one grade for each transcript, in order."""
    return [
      base.Grade.single(
        "json_schema", await threads.call(_conforms, self.schema, text or "")
      )
      for text in _found(transcripts, "whole", "")
    ]


@dataclasses.dataclass(frozen=True)
class Criterion:
  """One reward of a weighted sum, under a name of its own."""

  name: str
  reward: base.Reward
  weight: float = 1.0

  def __post_init__(self) -> None:
    if not self.name:
      raise ValueError(
        "name='' of a criterion: metrics need one, reward/<name>"
      )
    if not math.isfinite(self.weight):
      raise ValueError(f"weight={self.weight} of {self.name} must be finite")

  async def grades(
    self, task: base.Task, transcripts: Sequence[base.Transcript]
  ) -> Sequence[base.Grade]:
    """Returns the grades of its reward, or raises ValueError."""
    given = await self.reward(task, transcripts)
    return base.checked_grades(
      given, len(transcripts), f"criterion {self.name}"
    )


@dataclasses.dataclass(frozen=True)
class Weighted:
  """A weighted sum of rewards, whose parts are reported as `reward/<name>`.

  A part is the value of its reward before the weight. If one fails the sum
  fails, and is tried again as a whole.

  Attributes:
    criteria: their names must differ.
  """

  criteria: tuple[Criterion, ...]

  def __post_init__(self) -> None:
    names = [criterion.name for criterion in self.criteria]
    if not names:
      raise ValueError("criteria=(): a weighted sum needs at least one")
    if twice := sorted({name for name in names if names.count(name) > 1}):
      raise ValueError(
        f"criteria {twice} are there twice; give each its own name"
      )

  @property
  def stateless(self) -> bool:
    """True if all its rewards are stateless."""
    return all(criterion.reward.stateless for criterion in self.criteria)

  @property
  def compares(self) -> bool:
    """True if one of its rewards compares the members of a group."""
    return any(base.compares(criterion.reward) for criterion in self.criteria)

  @property
  def alone(self) -> "Weighted":
    """The sum for an episode without a group."""
    return Weighted(
      tuple(
        dataclasses.replace(one, reward=base.alone(one.reward))
        for one in self.criteria
      )
    )

  def check_task(self, task: base.Task) -> None:
    """Raises ValueError on a task that one of its rewards cannot grade."""
    for criterion in self.criteria:
      base.check_task(criterion.reward, task)

  async def __call__(
    self, task: base.Task, transcripts: Sequence[base.Transcript]
  ) -> Sequence[base.Grade]:
    """Returns one grade for each transcript, in order."""
    graded = await asyncio.gather(
      *(criterion.grades(task, transcripts) for criterion in self.criteria)
    )
    return [self._sum(grades) for grades in zip(*graded, strict=True)]

  def _sum(self, grades: Sequence[base.Grade]) -> base.Grade:
    pairs = list(zip(self.criteria, grades, strict=True))
    value = math.fsum(
      criterion.weight * grade.value for criterion, grade in pairs
    )
    return base.Grade(
      value, {criterion.name: grade.value for criterion, grade in pairs}
    )


def _found(
  transcripts: Sequence[base.Transcript], place: answers.Place, marker: str
) -> list[str | None]:
  return [answers.find(answers.last(t), place, marker) for t in transcripts]


def _unwrapped(text: str) -> str:
  """Returns an expression without a period, dollar signs or \\text around it.

  Thousands are joined, as math-verify multiplies 1 by 000 in 1\\,000.
  """
  text = text.translate(_AS_LATEX).strip().removesuffix(".").strip("$ ")
  wrapped = _TEXT.fullmatch(text)
  return _THOUSANDS.sub("", wrapped[1].strip() if wrapped else text)


def _check_marker(marker: str) -> None:
  if not marker.strip():
    raise ValueError(
      f"marker={marker!r} must be visible text before the answer, such as ####"
    )


@functools.lru_cache(maxsize=64)
def _validator(schema: str) -> Any:
  """Returns the validator of a schema: JSON text or a path."""
  import jsonschema
  import referencing
  from jsonschema import validators

  inline = schema.lstrip().startswith("{")
  try:
    text = schema if inline else pathlib.Path(schema).read_text("utf-8")
    data = json.loads(text)
    kind = validators.validator_for(data)
    kind.check_schema(data)
  except OSError as error:
    raise ValueError(
      f"schema={schema!r} must be a JSON object or a readable file: {error}"
    ) from error
  except (ValueError, jsonschema.SchemaError) as error:
    reason = getattr(error, "message", error)
    raise ValueError(
      f"schema={schema[:80]!r} is no schema: {reason}"
    ) from error
  return kind(data, registry=referencing.Registry())


def _conforms(schema: str, text: str) -> bool:
  if fenced := _FENCED.fullmatch(text):
    text = fenced[1]
  try:
    data = json.loads(
      text,
      object_pairs_hook=_unique,
      parse_constant=_finite,
      parse_float=_finite,
    )
    return bool(_validator(schema).is_valid(data))
  except (ValueError, RecursionError):  # ValueError: no JSON.
    return False


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  data = dict(pairs)
  if len(data) < len(pairs):
    raise ValueError("a key is repeated")
  return data


def _finite(text: str) -> float:
  if not math.isfinite(value := float(text)):
    raise ValueError(f"{text} is not finite")
  return value
