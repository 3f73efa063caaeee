"""Procedural puzzles with checked answers: the datasets of reasoning-gym.

question -> <answer>42</answer> -> 1.0
"""

import ast
import dataclasses
import difflib
import fractions
import functools
import os
import random
import re
import threading
from collections.abc import Sequence
from typing import Any

from envs import base, extras, threads

# Some scorers take time that grows with the square of the answer.
_MAX_CHARS = 20_000
_MAX_EXPRESSION_CHARS = 300

# Their items are drawn once, which takes time, so there are only so many.
_FINITE = {"acre", "gsm_symbolic", "list_functions", "word_ladder"}
_SIZE = 4_000

# Scorers that evaluate the answer as Python. It is untrusted: a call would run
# here, and 9**9**9 would hold the interpreter for ever.
_LITERALS = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}
_ARITHMETIC = {"countdown", "puzzle24"}
_ALGEBRA = {
  "intermediate_integration",
  "polynomial_multiplication",
  "simple_integration",
}
# Scorers of numbers. They write 1e999999999 out, digit by digit, and take nan
# for the right answer, as no comparison with it is true.
_NUMBERS = {
  "coin_flip",
  "complex_arithmetic",
  "decimal_arithmetic",
  "decimal_chain_sum",
  "number_format",
  "number_sorting",
  "polynomial_equations",
  "power_function",
}
_NO_NUMBER = re.compile(r"nan|inf|e[+-]?[\d_]{4}", re.IGNORECASE)

# Scorers that play the moves of an answer, A+999999999 one by one.
_MOVES = {"rubiks_cube", "rush_hour"}

# They go through sets of words, whose order is another one in each process.
_HASHED = {
  "codeio",
  "isomorphic_strings",
  "knight_swap",
  "polynomial_multiplication",
  "ransom_note",
  "word_ladder",
}

_LITERAL_NODES = (
  ast.Expression, ast.List, ast.Tuple, ast.Constant, ast.Name, ast.Load,
  ast.UnaryOp, ast.USub,
)  # fmt: skip
_ALGEBRA_NODES = (
  *_LITERAL_NODES, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow,
  ast.UAdd, ast.Call,
)  # fmt: skip
_FUNCTIONS = {
  "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp",
  "log", "ln", "sqrt", "Abs",
}  # fmt: skip
_MAX_EXPONENT = 12

# Items are made one at a time: a few draw from the global generator.
_making = threading.Lock()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReasoningGym:
  """Answer one question of a dataset of reasoning-gym (Apache-2.0).

  The answer is the text in the last `<answer>` tags, or else the whole answer,
  without the white space around it.
  The reward is 1 where the dataset's own scorer gives its full score, and 0
  otherwise: many scorers pay a little for junk. Their score is the metric
  `score`. Answers that a scorer cannot read count 0 and add to `unreadable`, as
  do those that it would run as a program.

  A hash of the question decides its split, so the splits share no question.

  Attributes:
    dataset: name of a dataset, such as chain_sum.
    level: of the dataset's curriculum, 0 is the easiest; None for the package's
      default settings.
    options: settings of the dataset by name, which win over those of the level.
      A list is written as words: (("operators", "+ -"),).
    system_prompt: name of one of the package's system prompts, such as
      default, which ask for tags; empty for none.
    label: name of the source; by default that of the dataset.
  """

  dataset: str
  level: int | None = None
  options: tuple[tuple[str, int | float | bool | str], ...] = ()
  system_prompt: str = ""
  label: str = ""

  def __post_init__(self) -> None:
    prompts = _package().utils.SYSTEM_PROMPTS
    if self.system_prompt and self.system_prompt not in prompts:
      raise ValueError(
        f"system_prompt={self.system_prompt}: must be one of "
        f"{', '.join(prompts)}, or empty"
      )
    base.check_name(self.name)
    _config(self)

  @property
  def name(self) -> str:
    """Short name: the first part of every task id."""
    return self.label or self.dataset

  def task(self, index: int, split: base.Split) -> base.Task:
    """Returns a task; its seed is the first one whose question is of the split.

    Makes the item, which takes most datasets less than a millisecond, and
    a few, such as zebra_puzzles, up to seconds.

    Raises:
      ValueError: no item is of the split.
    """

    def question(seed: int) -> str:
      return _entry(self, seed >> 1)["question"]

    # 31 bits: numpy's generators take no more than 32.
    seed = base.first_seed(f"{self}", split, index, question) >> 1
    answer = _entry(self, seed)["answer"]
    return base.Task(f"{self.name}/{split}/{index}", index, split, seed, answer)

  def __call__(self, task: base.Task) -> "_Question":
    """Returns a fresh question."""
    return _Question(self, task.seed)

  def oracle(self, task: base.Task, messages: Sequence[base.Message]) -> str:
    """Returns the dataset's own answer.

    Raises:
      ValueError: its scorer does not accept it.
    """
    entry = _entry(self, task.seed)
    if entry["answer"] is None or _score(self, entry["answer"], entry)[0] < 1:
      raise ValueError(
        f"{task.id} has no answer with the full score; use warm_start=none, or "
        f"leave {self.dataset} out of it"
      )
    return self._tagged(entry["answer"])

  def explore(
    self, task: base.Task, messages: Sequence[base.Message], seed: int
  ) -> str:
    """Returns the answer to a random other question."""
    other = random.Random(seed).getrandbits(31)
    return self._tagged(str(_entry(self, other)["answer"]))

  def _tagged(self, answer: str) -> str:
    return f"<answer>{answer}</answer>" if self.system_prompt else answer


class _Question:
  """One question: an answer ends it."""

  def __init__(self, source: ReasoningGym, seed: int):
    self._source = source
    self._seed = seed

  async def start(self) -> Sequence[base.Message]:
    entry = await threads.call(_entry, self._source, self._seed)
    asked = base.Message("user", entry["question"])
    if not (name := self._source.system_prompt):
      return [asked]
    text = _package().utils.SYSTEM_PROMPTS[name]
    return [base.Message("system", text), asked]

  async def step(self, answer: base.Message) -> base.Step:
    score, readable = await threads.call(self._score, answer.content)
    metrics = {"score": score, "unreadable": float(not readable)}
    return base.Step([], float(score >= 1), True, metrics)

  async def close(self) -> None:
    pass

  def _score(self, text: str) -> tuple[float, bool]:
    tagged = _package().utils.extract_answer(text)
    said = text.strip() if tagged is None else tagged
    return _score(self._source, said, _entry(self._source, self._seed))


def _package() -> Any:
  """Returns the package; not at the top, as it takes a second and is optional.

  Raises:
    ValueError: it is not installed.
  """
  extras.require("reasoning_gym", "reasoning", "this environment")
  import reasoning_gym  # pyright: ignore[reportMissingImports]

  return reasoning_gym


def _config(source: ReasoningGym) -> Any:
  """Returns the settings of a dataset in the package's own class.

  Raises:
    ValueError: something in the source does not fit; names what does.
  """
  factory = _package().factory
  known = sorted({*factory.DATASETS} - {"composite"})
  if source.dataset not in known:
    near = difflib.get_close_matches(source.dataset, known, 3) or known
    raise ValueError(
      f"dataset={source.dataset}: there is no such dataset; use "
      f"{' or '.join(near)}, and mixture.Mixture for several"
    )
  if (
    source.dataset in _HASHED
    and not os.environ.get("PYTHONHASHSEED", "random").isdecimal()
  ):
    raise ValueError(
      f"dataset={source.dataset}: its questions depend on the hash seed of the "
      "process, so a resumed run would have others; set the environment "
      "variable PYTHONHASHSEED=0"
    )
  config = _level(source)
  fields = {f.name for f in dataclasses.fields(config)} - {"seed", "size"}
  for name, _ in source.options:
    if name not in fields:
      raise ValueError(
        f"options: {source.dataset} has no {name!r}; it has "
        f"{', '.join(sorted(fields))}"
      )
  try:
    given = {n: _like(getattr(config, n), v) for n, v in source.options}
    config = dataclasses.replace(config, **given, seed=0, size=_SIZE)
    if hasattr(config, "validate"):
      config.validate()
  except (AssertionError, TypeError, ValueError) as error:
    raise ValueError(
      f"options={source.options} do not fit {source.dataset}: {error}"
    ) from error
  return config


def _level(source: ReasoningGym) -> Any:
  factory = _package().factory
  if source.level is None:
    return factory.DATASETS[source.dataset][1]()
  if not factory.has_curriculum(source.dataset):
    raise ValueError(
      f"level={source.level}: {source.dataset} has no curriculum; use options"
    )
  curriculum = factory.create_curriculum(source.dataset)
  attributes = curriculum.attributes.values()
  num_levels = max((len(a.levels) for a in attributes), default=1)
  if not 0 <= source.level < num_levels:
    raise ValueError(
      f"level={source.level}: {source.dataset} has levels 0 to {num_levels - 1}"
    )
  curriculum.set_global_level(source.level)
  return curriculum.generate_configuration()


def _like(default: Any, value: Any) -> Any:
  """Returns words as the list that a setting is."""
  if isinstance(default, list | tuple) and default:
    return type(default)(type(default[0])(word) for word in str(value).split())
  return value


@functools.lru_cache(maxsize=256)
def _dataset(source: ReasoningGym) -> Any:
  return _package().factory.DATASETS[source.dataset][0](_config(source))


@functools.lru_cache(maxsize=1024)
def _entry(source: ReasoningGym, seed: int) -> dict[str, Any]:
  """Returns question, answer and metadata; members of a group share it."""
  finite = source.dataset in _FINITE
  with _making:
    before = random.getstate()
    random.seed(seed)
    try:
      return _dataset(source)[seed % _SIZE if finite else seed]
    finally:
      random.setstate(before)


def _score(
  source: ReasoningGym, answer: str, entry: dict[str, Any]
) -> tuple[float, bool]:
  """Returns (score by the dataset, whether its scorer could read the answer).

  A blank answer has none, whatever the scorer says.
  """
  if not answer.strip():
    return 0.0, True
  if not _is_safe(source.dataset, answer):
    return 0.0, False
  also = _ALSO.get(source.dataset)
  try:
    score = float(_dataset(source).score_answer(answer, entry))
    if score >= 1 and also and not also(answer, entry):
      return 0.0, True
  except Exception:  # Whatever a scorer stumbles over is no right answer.
    return 0.0, False
  return (score, True) if 0 <= score <= 1 else (0.0, False)


def _is_near(answer: str, entry: dict[str, Any]) -> bool:
  """Returns whether a probability is right: the scorer takes 0 for 0.125."""
  right = fractions.Fraction(entry["answer"])
  return abs(fractions.Fraction(answer.replace(",", "")) - right) <= 1e-4


def _is_same(answer: str, entry: dict[str, Any]) -> bool:
  """Returns whether a word is right: the scorer takes any for True."""
  return answer.strip().lower() == str(entry["answer"]).strip().lower()


def _makes_24(answer: str, entry: dict[str, Any]) -> bool:
  """Returns whether a solution is 24 and uses the numbers that it was given.

  The scorer takes 24.5, and 6*4*1*1 for every puzzle.
  """
  import sympy

  numbers = sorted(int(n) for n in re.findall(r"\d+", answer))
  right = numbers == sorted(entry["metadata"]["numbers"])
  return right and sympy.parse_expr(answer) == 24


def _is_alone(answer: str, entry: dict[str, Any]) -> bool:
  """Returns whether an answer has no more words than the dataset's own.

  The scorers look for it anywhere, also behind "not" and in a list of guesses.
  """
  counts = (len(re.findall(r"[^\s,;]+", x)) for x in (answer, entry["answer"]))
  return next(counts) <= next(counts)


def _is_walk(answer: str, entry: dict[str, Any]) -> bool:
  """Returns whether an answer is moves alone, too few for a random walk."""
  moves = "".join(answer.split())
  few = len(moves) <= 5 * len(entry["answer"])
  return few and bool(re.fullmatch("[UDLR]+", moves, re.IGNORECASE))


# Asked where the dataset's own scorer gives its full score too easily.
_ALSO = {
  "advanced_geometry": _is_alone,
  "coin_flip": _is_near,
  "fraction_simplification": _is_alone,
  "game_of_life_halting": _is_same,
  "gsm_symbolic": _is_alone,
  "kakurasu": _is_alone,
  "knights_knaves": _is_alone,
  "letter_jumble": _is_alone,
  "puzzle24": _makes_24,
  "quantum_lock": _is_alone,
  "sokoban": _is_walk,
  "survo": _is_alone,
  "time_intervals": _is_alone,
  "word_sorting": _is_alone,
}


def _is_safe(dataset: str, answer: str) -> bool:
  """Returns whether a scorer may see an answer; see _LITERALS and below."""
  if dataset in _NUMBERS:
    return len(answer) <= _MAX_CHARS and not _NO_NUMBER.search(answer)
  if dataset in _MOVES:
    return len(answer) <= _MAX_CHARS // 10 and not re.search(r"\d{3}", answer)
  if dataset in _ARITHMETIC:
    # Plain integers: 0x11 or 1e3 would hide from the check of numbers used.
    plain = re.fullmatch(r"[0-9\s()+*/-]+", answer)
    return bool(plain) and "**" not in answer and _is_expression(answer)
  if dataset in _ALGEBRA:
    return _is_expression(answer)
  if dataset in _LITERALS:
    nodes = _nodes(answer)
    # No Python at all is safe, too.
    return nodes is None or all(isinstance(n, _LITERAL_NODES) for n in nodes)
  return len(answer) <= _MAX_CHARS


def _is_expression(answer: str) -> bool:
  """Returns whether an answer is a small formula without anything to run."""
  nodes = _nodes(answer) if len(answer) <= _MAX_EXPRESSION_CHARS else None
  return nodes is not None and all(map(_is_algebra, nodes))


def _nodes(answer: str) -> list[ast.AST] | None:
  """Returns the syntax of an answer as Python; None if it is none."""
  try:
    return list(ast.walk(ast.parse(answer.strip(), mode="eval")))
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return None


def _is_algebra(node: ast.AST) -> bool:
  match node:
    case ast.Constant(value=value):
      return isinstance(value, int | float) and abs(value) < 1e12
    case ast.Name(id=name):
      return len(name) == 1 or name in _FUNCTIONS
    case ast.Call(func=ast.Name(id=name), args=[_], keywords=[]):
      return name in _FUNCTIONS
    case ast.BinOp(left=left, op=ast.Pow(), right=right):
      # A tower of powers is as bad as a large one.
      return _exponent(right) <= _MAX_EXPONENT and not any(
        isinstance(n, ast.Pow) for side in (left, right) for n in ast.walk(side)
      )
    case ast.Call() | ast.List() | ast.Tuple():
      return False
  return isinstance(node, _ALGEBRA_NODES)


def _exponent(node: ast.AST) -> float:
  """Returns the largest number in an exponent."""
  values = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant))
  return max((abs(v) for v in values if isinstance(v, int | float)), default=0)
