"""A page as one file: its modules share a scope, and nothing gets out of it."""

import json
import math
import re

import pytest

from launch.report import frozen

_NAME = re.compile(
  r"^(?:export )?(?:async )?(?:const|let|function|class) (\w+)", re.MULTILINE
)


def modules():
  return sorted(frozen.STATIC.glob("*.js"))


def test_no_two_modules_define_one_name():
  places = {}
  for path in modules():
    for name in _NAME.findall(path.read_text()):
      places.setdefault(name, []).append(path.name)
  assert not {name: at for name, at in places.items() if len(at) > 1}


def test_a_bundle_has_every_module_once_before_those_that_import_it():
  text = frozen.bundle("frozen.js")
  assert "import " not in re.sub(r"//.*", "", text)
  assert not re.search(r"^export ", text, re.MULTILINE)
  for name in ("function el(", "function lineChart(", "function runPage("):
    assert text.count(name) == 1
  assert text.index("function el(") < text.index("function runPage(")


def test_every_module_but_other_entries_is_part_of_the_page():
  text = frozen.bundle("frozen.js")
  for path in modules():
    (first, *_) = path.read_text().splitlines()
    is_entry = path.name in ("live.js", "timelines.js")
    assert (first in text) != is_entry, path.name


def test_data_that_look_like_a_part_of_the_page_stay_data():
  evil = '</script><link rel="stylesheet" href="style.css"><!--'
  page = frozen.page("a <b> run", {"text": evil})
  assert "<title>a &lt;b&gt; run · Twinmesh</title>" in page
  assert page.count("</script>") == 2
  (data,) = re.findall(r'id="data">(.*?)</script>', page)
  assert json.loads(data) == {"text": evil}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_null(value):
  assert frozen.json_text({"a": [value, 1.5]}) == '{"a":[null,1.5]}'


def test_the_policy_of_the_page_names_its_own_script_and_style():
  page = frozen.page("x", {})
  (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
  assert policy.startswith("default-src 'none'; script-src 'sha256-")
  assert "unsafe" not in policy
