"""The place of an answer in a text, and numbers as exact fractions."""

from fractions import Fraction

import pytest

from envs import base
from envs.rewards import answers


def test_only_the_content_of_the_last_answer_counts():
  messages = [
    base.Message("assistant", "41"),
    base.Message("user", "sure?"),
    base.Message("assistant", "no", reasoning="42"),
    base.Message("tool", "43"),
  ]
  assert answers.last(base.Transcript(messages, [])) == "no"
  assert answers.last(base.Transcript(messages[1:2], [])) == ""


@pytest.mark.parametrize("answer", [None, "", " \n", 42])
def test_a_task_without_an_answer_is_named(answer):
  task = base.Task("sums/train/3", 3, "train", 0, answer)
  with pytest.raises(ValueError, match="sums/train/3 has answer="):
    answers.reference(task)


@pytest.mark.parametrize(
  ("place", "text", "found"),
  [
    ("whole", " 42\n", "42"),
    ("whole", " ", None),
    ("whole", "x" * (answers.MAX_CHARS + 1), None),
    ("boxed", r"so \boxed{42}.", "42"),
    ("boxed", r"\boxed{1} or \boxed{ 2 }", "2"),
    ("boxed", r"\boxed {\frac{1}{2}}", r"\frac{1}{2}"),
    ("boxed", r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    ("boxed", r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
    ("boxed", r"\boxed{1}, no: \boxed{2", None),
    ("boxed", r"\boxed{}", None),
    ("boxed", r"\boxed 42", None),
    ("boxed", "42", None),
    ("boxed", r"\boxed{42}" + "x" * answers.MAX_CHARS, None),
    ("boxed", "x" * answers.MAX_CHARS + r"\boxed{42}", "42"),
    ("marker", "#### 1\nno\n#### 2 \nthe end", "2"),
    ("marker", "#### 42", "42"),
    ("marker", "**####** 42\r\n", "42"),
    ("marker", "**#### x * y**", "x * y"),
    ("marker", "**####**", None),
    ("marker", "42", None),
    ("marker", "42 ####", None),
    ("marker", "####\n42", None),
    ("marker", "", None),
  ],
)
def test_an_answer_is_found_in_its_place(place, text, found):
  assert answers.find(text, place, "####") == found


@pytest.mark.parametrize(
  ("text", "value"),
  [
    ("42", 42),
    ("It is 42.", 42),
    ("x=-5", -5),
    ("−5", -5),  # the sign of typesetting
    ("It is –5.", -5),  # an en dash
    ("The balance is -$50.", -50),
    (r"-\$50", -50),
    ("–€ 50", -50),
    ("$x = - 5$", -5),
    ("x = - $.5", Fraction(-1, 2)),
    ("- 5", -5),
    ("(3, - 5)", -5),
    ("Items:\n- 4 pears\n- 5 nuts", 5),
    (r"\text{It is }-5", -5),
    ("10 - 5", 5),
    ("10 - $5", 5),
    ("$10-$5", 5),
    ("pages 3–5", 5),
    ("so: -(5)", None),
    ("-{5}", None),
    (r"7 and -\sqrt{5}", None),
    ("7-5", 5),
    ("(7)-5", 5),
    ("1,234,567.5", Fraction(2469135, 2)),
    ("1{,}234", 1234),
    ("1,2", 2),
    ("12,3456", 3456),
    ("3/4", Fraction(3, 4)),
    (r"\frac{1}{2}", Fraction(1, 2)),
    (r"so x=-\dfrac{ 3 }{4}", Fraction(-3, 4)),
    (r"-\frac{-3}{4}", Fraction(3, 4)),
    (r"x-\frac{3}{4}", Fraction(3, 4)),
    ("1 / 3", Fraction(1, 3)),
    ("It is -3 1/2.", Fraction(-7, 2)),
    (r"3\frac{1}{2}", Fraction(7, 2)),
    (r"\frac12", Fraction(1, 2)),
    (r"-\dfrac 1{12}", Fraction(-1, 12)),
    ("7, 1/2", Fraction(1, 2)),
    ("The area is 25 m^2.", 25),
    (r"25 m^{2}, or 25 \text{ m}^{-2}", 25),
    ("7 or 2^10", None),
    ("7 or 1.5^2", None),
    ("7 or 1.5²", None),
    ("7 or 5 ^2", None),
    ("_42_", 42),
    ("__42__", 42),
    ("x_42", None),
    (r"x, \vec{x}_42", None),
    ("Rs.42", 42),
    ("-USD42", -42),
    ("1\u202f234\u00a0567", 1234567),
    ("1 234", 234),  # or two numbers
    ("-.5", Fraction(-1, 2)),
    ("1e-3", Fraction(1, 1000)),
    ("5kg", 5),
    ("$5 or 50%", 50),
    ("答案是42元", 42),
    ("1 2 3", 3),
    # One more than a float can tell from the number before.
    ("9007199254740993", 9007199254740993),
    ("1e999", 10**999),
    ("1/0", None),
    ("", None),
    ("none", None),
    ("nan inf -inf", None),
    ("x2", None),
    ("٤٢", None),
    ("４２", None),
    ("4٢", None),
    ("5²", None),
    ("1e99999", None),
    ("9" * 101, None),
    # In parts of at most 34 groups of digits: 1500 = 33 + 43 * 34 + 5.
    ("1" + ",111" * 1500, int("111" * 5)),
  ],
)
def test_the_last_number_of_a_text_is_exact(text, value):
  assert answers.last_number(text) == value


@pytest.mark.parametrize(
  ("text", "value"),
  [
    ("42 apples", 42),
    ("42 = 42.0", 42),
    ("x = 42", 42),
    (r"x_2 \approx -42", -42),
    (r"\frac{84}{2}", 42),
    ("84/2", 42),
    ("42 m^2", 42),
    # Units, emphasis and markup.
    (r"42\%", 42),
    (r"42\text{ cm}", 42),
    (r"42\,\text{N}\cdot\text{m}", 42),
    (r"42^\circ", 42),
    (r"42^{\circ}", 42),
    ("the 42^{nd}", 42),
    ("$42/kg", 42),
    ("42 km/h", 42),
    ("a 42-year-old", 42),
    ("**42**", 42),
    ("42** apples", 42),
    ("**The answer** -> 42.", 42),
    ("<answer>42</answer>", 42),
    ("41 or 42", None),
    ("a", None),
  ],
)
def test_a_text_with_two_numbers_has_no_single_one(text, value):
  assert answers.number(text) == value


@pytest.mark.parametrize(
  "text",
  [
    r"\sqrt{5}",
    r"\frac{5}{x}",
    r"\frac555",
    r"5\pi",
    "5π",
    "5!",
    "5^5",
    "5^n",
    "5^{-n}",
    "5+5",
    "5-5",
    "5 - 5",
    "5*5",
    r"5 \times 5",
    "5/(5)",
    "(x)/5",
    "x-5",
    "x + 5",
    "5+",
    r"\pm 5",
    r"x \neq 5",
    r"\ge 5",
    "x > 5",
    "x <= 5",
    "x != 5",
    "-(5)",
  ],
)
def test_a_number_in_an_expression_is_no_answer(text):
  assert answers.number(text) is None
