"""A typed value is taken apart at commas and brackets, and not evaluated."""

import pytest

from rl.settings import setting_text


@pytest.mark.parametrize(
  ("text", "parts"),
  [
    ("2,4", ["2", "4"]),
    (" ( 2 , 4 ) ", ["2", "4"]),
    ("[2]", ["2"]),
    ("(2)", ["2"]),
    ("2,", ["2"]),
    ("(2,)", ["2"]),
    ("()", []),
    ("((1,2),(3,))", ["(1,2)", "(3,)"]),
    ("'a, b',c", ["a, b", "c"]),
    ("a(b,c),d", ["a(b,c)", "d"]),
    ("(a),(b)", ["(a)", "(b)"]),
    ("{}", {}),
    ('{"data": 2}', {"data": "2"}),
    ("{data: 2, model: 4,}", {"data": "2", "model": "4"}),
    ("{a: {b: 1}, c: x:y}", {"a": "{b: 1}", "c": "x:y"}),
    ("a.B", {"class": "a.B"}),
    ("a.B()", {"class": "a.B"}),
    ("B()", {"class": "B"}),
    (
      "a.B(c=3e-4, path=/x/y-z, kind=k3+, size=1.7b)",
      {
        "class": "a.B",
        "c": "3e-4",
        "path": "/x/y-z",
        "kind": "k3+",
        "size": "1.7b",
      },
    ),
    (
      "a.B(c=d.E(f=1,g=(2,3)),h='=,)')",
      {"class": "a.B", "c": "d.E(f=1,g=(2,3))", "h": "=,)"},
    ),
    (
      "a.B(word=it's, other='a b')",
      {"class": "a.B", "word": "it's", "other": "a b"},
    ),
    ("1.5", "1.5"),
    ("word", "word"),
    ("'a.b'", "a.b"),
    ("'it\\'s'", "it's"),
    ("a.b/c", "a.b/c"),
    ("a.B()+1", "a.B()+1"),
    ("'a' or 'b'", "'a' or 'b'"),
  ],
)
def test_a_value_is_taken_apart(text, parts):
  found = setting_text.take_apart(text)
  if isinstance(found, list):
    assert [str(item) for item in found] == parts
  elif isinstance(found, dict):
    assert {name: str(item) for name, item in found.items()} == parts
  else:
    assert found == setting_text.Text(parts)


@pytest.mark.parametrize(
  ("text", "reason"),
  [
    ("", "a value is missing"),
    ("2,,4", "a value is missing"),
    (",2", "a value is missing"),
    ("a.B(c=)", "a value is missing"),
    ("(2", "'(' is not closed"),
    ("2)", "')' closes nothing"),
    ("(2]", "']' does not close '('"),
    ("a.B(c=[1)", "')' does not close '['"),
    ("'a", "' is not closed"),
    ("a.B(1)", "'1' lacks a name; write NAME=VALUE"),
    ("a.B(**c)", "'**c' lacks a name; write NAME=VALUE"),
    ("{a}", "'a' lacks a name; write NAME:VALUE"),
    ("a.B(c d=1)", "'c d' is no name of a field"),
  ],
)
def test_what_does_not_match_is_told(text, reason):
  with pytest.raises(ValueError, match=r"\w") as error:
    setting_text.take_apart(text)
  assert str(error.value) == reason
