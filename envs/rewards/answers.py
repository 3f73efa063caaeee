r"""The final answer of an episode: where it stands, and its value as a number.

transcript -> last: content of the agent's last message, without its reasoning
  -> find: all of it, or the last box, or the end of the line after the marker
  -> number, last_number: an exact fraction

Of several boxes, markers or numbers only the last counts, so that a list of
guesses earns no more than one guess.
"""

import fractions
import re
from typing import Literal

from envs import base

Place = Literal["whole", "boxed", "marker"]
"""Where the answer stands in the text.

  whole    the text is the answer
  boxed    in the last \\boxed{...}
  marker   after the last marker, up to the end of its line
"""

MAX_CHARS = 10_000
"""Length of the end of a text in which an answer is looked for."""

_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_FRACTION_BEGINS = re.compile(r"(?<![-+])(?=\\[cdt]?frac)")
# Without braces it takes a digit: \frac12 is 1/2.
_FRACTION = re.compile(
  r"\\[cdt]?frac\s*(?:\{\s*(-?[0-9]+)\s*\}|([0-9]))"
  r"\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))(?![0-9])"
)
_TIMES = re.compile(r"\\(?:times|cdot|div)(?![A-Za-z])")
_EXPONENT = re.compile(r" ?\^\s*(?:[-+]?[0-9]+|\{\s*[-+]?[0-9.]+\s*\})")
_THIN_SPACE = re.compile(r"(?<=\d)[\u00a0\u2009\u202f](?=\d{3}(?!\d))")
_CURRENCY = re.compile(
  r"(?<![\w.])(?:\\?[$€£¥₹]|Rs\.?|USD|EUR|GBP|JPY|CNY|INR)\s*(?=[.\d])"
)
# Neither in 10 - 5 nor at the head of a line, where it begins an item.
_SPACED_MINUS = re.compile(r"(^|[=:(\[{,$])([ \t]*)-[ \t]+(?=[.\d])")
# ASCII alone: \d and float() also take the digits of other scripts. Lengths
# are bounded since a number becomes an exact integer, however large.
_NUMBER = re.compile(
  r"""
  (?P<negated> -(?:\\[a-z]+)?[({] )?   # in -(5) and -\sqrt{5} it is not 5
  (?<![0-9A-Za-z.]) (?<!\d)            # neither x2 nor the end of 1.2.3
  (?<![0-9A-Za-z)\]}]_)                # not x_2, but _2_
  (?P<sign> (?<![-)\]])[-+] )?         # in 7-5 and (7)-5 it is an operator
  (?>
    (?: (?P<whole>[0-9]{1,100}) [ ]+ (?=[0-9]+[ ]*/[ ]*[0-9]) )?
    (?P<top>
      (?: [0-9]{1,3}(?:,[0-9]{3}){1,33}(?![0-9]) | [0-9]{1,100} )
      (?: \.[0-9]{1,100} )?
      | \.[0-9]{1,100}
    )
    (?: [eE](?P<exponent>[-+]?[0-9]{1,3})(?![0-9])
      | [ ]*/[ ]*(?P<bottom>[0-9]{1,100}) )?
  )
  (?P<power> [²³¹⁰⁴-⁹] )?
  (?! \d | [eE][-+]?[0-9] )
  """,
  re.VERBOSE,
)
_TAG = re.compile(r"</?\w+>")
# In a text with 0 for its numbers. Units, as in $42/kg and 90^\circ, emphasis,
# as in 42**, and arrows make no expression.
_EXPRESSION = re.compile(
  r"""
  \\(?:sqrt|[cdt]?frac|binom|log|ln|sin|cos|tan|pi|pm)(?![A-Za-z]) | [√π±]
  | \\(?:neq?|leq?|geq?|leqslant|geqslant|lt|gt)(?![A-Za-z])
  | [≠≤≥] | != | (?<![-=])[<>]
  | 0 \s* [!+]                                  # 5! and 100+
  | 0 \s* \^ \s* [{]? [-(]? [A-Za-z]\b          # 2^n, not 4^{th}
  | 0 \s* [-*/×÷·] \s* [0(\[{]
  | (?: [0)\]}] | \b[A-Za-z] ) \s* [-+*/×÷·] \s* 0
  """,
  re.VERBOSE,
)


def reference(task: base.Task) -> str:
  """Returns the answer that a task expects.

  Raises:
    ValueError: it has none.
  """
  # A source of rows may have put a number there.
  if not isinstance(task.answer, str) or not task.answer.strip():
    raise ValueError(
      f"task {task.id} has answer={task.answer!r}, but its reward compares "
      "with an answer: its source must give one, as text that is not empty "
      "(base.Task.answer), or use rewards.Outcome()"
    )
  return task.answer.strip()


def last(transcript: base.Transcript) -> str:
  """Returns the content of the agent's last message; "" if it said nothing."""
  said = (m for m in reversed(transcript.messages) if m.role == "assistant")
  message = next(said, None)
  return "" if message is None else message.content


def find(text: str, place: Place, marker: str) -> str | None:
  """Returns the answer in a text, stripped; None if there is none."""
  if place == "whole":
    found = text if len(text) <= MAX_CHARS else ""
  elif place == "boxed":
    found = _last_box(text[-MAX_CHARS:])
  else:
    _, mark, rest = text[-MAX_CHARS:].rpartition(marker)
    # Of **Answer:** 42 and **Answer: 42**, the emphasis is no part of it.
    found = rest.partition("\n")[0].strip("* \t\r") if mark else ""
  return found.strip() or None


def number(text: str) -> fractions.Fraction | None:
  """Returns the only number in a text.

  None if there is none, or several, or if it is a part of an expression.
  """
  text = _plain(text)
  values = {_value(match) for match in _NUMBER.finditer(text)}
  rest = _TAG.sub("", _NUMBER.sub("0", text))
  if len(values) != 1 or _EXPRESSION.search(rest):
    return None
  return values.pop()


def last_number(text: str) -> fractions.Fraction | None:
  """Returns the last number in a text; None if there is none."""
  matches = list(_NUMBER.finditer(_plain(text[-MAX_CHARS:])))
  return _value(matches[-1]) if matches else None


def _last_box(text: str) -> str:
  r"""Returns the content of the last \boxed{}; "" if it does not end."""
  boxes = list(_BOX.finditer(text))
  if not boxes:
    return ""
  start, depth = boxes[-1].end(), 1
  for brace in _BRACE.finditer(text, start):
    # An escaped brace is part of the answer, as in \{1, 2\}.
    depth += {"{": 1, "}": -1}.get(brace[0], 0)
    if not depth:
      return text[start : brace.start()]
  return ""


def _plain(text: str) -> str:
  """Returns a text with the signs of typesetting as those of plain text."""
  for dash in "−–":
    text = text.replace(dash, "-")
  text = text.replace("{,}", ",").replace("\\,", "")
  text = _EXPONENT.sub("²", _THIN_SPACE.sub("", text))
  text = _FRACTION.sub(r"\1\2/\3\4", _FRACTION_BEGINS.sub(" ", text))
  text = _CURRENCY.sub("", _TIMES.sub("*", text))
  return _SPACED_MINUS.sub(r"\1\2-", text)


def _value(match: re.Match[str]) -> fractions.Fraction | None:
  """Returns the value; None of 1/0, 5² or -(5)."""
  bottom = int(match["bottom"] or 1)
  if not bottom or match["negated"] or match["power"]:
    return None
  top = match["top"].replace(",", "") + f"e{match['exponent'] or 0}"
  value = fractions.Fraction(f"0{top}" if top[0] == "." else top) / bottom
  value += int(match["whole"] or 0)
  return -value if match["sign"] == "-" else value
