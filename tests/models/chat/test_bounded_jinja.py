"""Templates that would take hours or all memory, and those that may not."""

import pytest

from models.chat import bounded_jinja
from models.chat import template as template_lib
from tests.helpers.chat_messages import GoldenMessage

GROWING = "{%% set n = namespace(x='ab') %%}%s{%% endfor %%}{{ n.x }}"
FOR = "{% for i in range(99) %}"
TWICE = "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}"
ARGUMENTS = "{% macro f() %}{% set n.x = varargs %}{% endmacro %}"


def render(source):
  chat = template_lib.ChatTemplate(source, ("<end>",))
  return chat.render([GoldenMessage("user", "hi")], prompt=False)


@pytest.fixture
def little(monkeypatch):
  """A thousandth of the budget, so that the tests are quick."""
  monkeypatch.setattr(bounded_jinja, "MAX_WORK", 1 << 17)


@pytest.mark.parametrize(
  "source",
  [
    "{{ 'x' * 10**9 }}",
    "{{ 10**9 * 'x' }}",
    "{{ [1] * 10**9 }}",
    "{% autoescape 'x' * 10**9 %}{% endautoescape %}",
    "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}"
    "{% endfor %}",
    "{% for a in range(9999) %}" + "x" * 999 + "{% endfor %}",
    "{% set y %}{% for a in range(9999) %}xxxxxxxxxxxx{% endfor %}{% endset %}",
    "{% set x = 'a' * 9999 %}{{ x.replace('a', x) }}",
    "{% set x = 'a' * 9999 %}{{ x | replace('a', x) }}",
    "{% set x = 'a' * 9999 %}{{ x.join(x) }}",
    "{% set x = 'a' * 9999 %}{{ x | join(x) }}",
    "{% set x = 'a' * 9999 %}{{ ('%s' * 99) | format(x) }}",
    "{% set x = 'a' * 9999 %}{{ ('{0}' * 99).format(x) }}",
    "{% set x = '\\n' * 9999 %}{{ x | indent(x) }}",
    "{{ ('a' * 9999).split('a') }}",
    "{{ ('\\n' * 99999).splitlines() }}",
    "{{ [[[1] * 99]] | tojson(indent=9999) }}",
    GROWING % f"{FOR}{{% set n.x = n.x + n.x %}}",
    GROWING % f"{FOR}{{% set n.x = n.x ~ n.x %}}",
    GROWING % f"{FOR}{{% set n.x = [n.x, n.x] %}}",
    GROWING % f"{FOR}{{% set n.x = (n.x, n.x) %}}",
    GROWING % f"{FOR}{{% set n.x = {{1: n.x, 2: n.x}} %}}",
    GROWING % f"{FOR}{{% set n.x = [n.x] + [n.x] %}}",
    GROWING % f"{FOR}{{% set n.x = [n.x] * 2 %}}",
    GROWING % f"{FOR}{{% set n.x = dict(a=n.x, b=n.x) %}}",
    GROWING % f"{TWICE}{FOR}{{% set n.x = f(n.x) %}}",
    GROWING % f"{ARGUMENTS}{FOR}{{{{ f(n.x, n.x) }}}}",
    GROWING % f"{FOR}{{% set y %}}{{{{ n.x }}}}{{{{ n.x }}}}{{% endset %}}"
    "{% set n.x = y %}",
    "{% set n = namespace(x=[], y='a' * 9999) %}" + FOR + "{% set n.x ="
    " [n.x, n.y[1:]] %}{% endfor %}",
    "{% set n = namespace(x=[], y='a' * 9999) %}" + FOR + "{% set n.x ="
    " [n.x, n.y | upper] %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "{% for x in [1] recursive %}{% if loop.depth < 60 %}{{ loop([1]) }}"
    "{{ loop([1]) }}{% endif %}{% endfor %}",
  ],
)
def test_a_template_makes_no_more_than_the_budget(little, source):
  with pytest.raises(ValueError, match=r"more than 131,072 characters"):
    render(source)


@pytest.mark.parametrize(
  ("source", "message"),
  [
    ("{{ 'x' | center(10**9) }}", "a width of 1,000,000,000; use 10,000"),
    ("{{ ['x'] | map('center', 10**9) | list }}", "a width of 1,000,000,000"),
    ("{{ 'x' | indent(10**9) }}", "a width of"),
    ("{{ [1] | tojson(indent=10**9) }}", "a width of"),
    ("{{ 5 | round(-10**9) }}", "a width of"),
    ("{{ 'x'.ljust(10**9) }}", "a width of"),
    ("{{ '%1000000000d' % 1 }}", "a width of"),
    ("{{ '%1000000000d' | format(1) }}", "a width of"),
    ("{{ '%*d' % (10**9, 1) }}", "a width or an attribute that is a value"),
    ("{{ '{:1000000000}'.format(1) }}", "a width of"),
    ("{{ '{:{}}'.format(1, 10**9) }}", "a width or an attribute"),
    ("{{ '{.x}'.format(namespace(x=1)) }}", "a width or an attribute"),
    ("{{ 9 ** 9999999 }}", "a number of 39,999,996 bits; use 4,096"),
    ("{{ (3 ** 2000) * (2 ** 1500) }}", "a number of 4,671 bits"),
    ("{{ ('f' * 9999) | int(base=16) }}", "a number of 39,996 bits"),
    ("{{ (1).to_bytes(10**9, 'big') }}", "to_bytes is not allowed"),
    ("{{ 'x'.encode() }}", "the method encode is not allowed"),
    ("{{ strftime_now('%99999999Y') }}", "or a width; use 200 or fewer"),
    ("{{ strftime_now('%c' * 101) }}", "a time has 202 characters"),
  ],
)
def test_a_number_cannot_ask_for_much(source, message):
  with pytest.raises(ValueError, match=message):
    render(source)


@pytest.mark.parametrize(
  "source",
  [
    "{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}",
    "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "{% for x in [1] %}" * 30 + "{% endfor %}" * 30,
    "{{ 'x' | random }}",
  ],
)
def test_what_python_cannot_compile_is_not_valid(source):
  with pytest.raises(ValueError, match="is not valid Jinja"):
    template_lib.ChatTemplate(source, ("<end>",))


def test_a_template_is_not_too_long():
  with pytest.raises(
    ValueError, match="262,145 characters; use one of 262,144"
  ):
    template_lib.ChatTemplate("x" * 262_145, ("<end>",))


def test_time_is_bounded_where_nothing_is_made(monkeypatch):
  monkeypatch.setattr(bounded_jinja, "MAX_CPU_S", 0.01)
  source = (
    "{% set x = 'a' * 10**6 %}"
    "{% for i in range(99999) %}{{ 'b' in x }}{% endfor %}"
  )
  with pytest.raises(ValueError, match=r"takes more than 0\.01 s"):
    render(source)


@pytest.mark.parametrize(
  ("source", "text"),
  [
    ("{% for a, b in {'x': 1} | items %}{{ a }}{{ b }}{% endfor %}", "x1"),
    ("{% for x in 'abc' if x != 'b' %}{{ loop.index }}{{ x }}"
     "{{ loop.last }}{{ loop.length }}{% endfor %}", "1aFalse22cTrue2"),
    ("{% for x in [] %}{% else %}none{% endfor %}", "none"),
    ("{% for x in nothing %}{% endfor %}", ""),
    ("{{ [1, 'b', none, 2.5, true] }}", "[1, 'b', None, 2.5, True]"),
    ("{{ 'a' ~ 1 ~ none ~ ('<' | safe) ~ '>' }}", "a1None<>"),
    ("{{ 'abcd'[1:3] }}{{ [1, 2, 3][::-1] }}{{ 'abc'[-1] }}", "bc[3, 2, 1]c"),
    ("{{ 'a,b'.split(',') }}{{ 'a b'.split() }}", "['a', 'b']['a', 'b']"),
    ("{{ '%s is %02d' % ('x', 7) }}{{ '%(a)s' % {'a': 1} }}", "x is 071"),
    ("{{ '%.2f' | format(1.5) }}{{ '{:>4}{a}'.format(1, a=2) }}", "1.50   12"),
    ("{{ 'ab'.center(4) }}|{{ 'ab' | center(4) }}|", " ab | ab |"),
    ("{{ 'a\\nb' | indent(2) }}", "a\n  b"),
    ("{{ [{'a': 1}, {'a': 2}] | join('-', attribute='a') }}", "1-2"),
    ("{{ 'aaa'.replace('a', 'b', 2) }}{{ 'aa' | replace('a', 'c', 1) }}",
     "bbaca"),
    ("{{ 'x' * 3 }}{{ 2 ** 10 }}{{ [1] + [2] }}{{ 7 % 4 }}", "xxx1024[1, 2]3"),
    ("{% set n = namespace(a=1) %}{% set n.a = n.a + 1 %}{{ n.a }}{{ n }}",
     "2<namespace>"),
    ("{% macro f(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{% endmacro %}"
     "{{ f(1) }}{{ f(1, 3, 4) }}", "12()13(4,)"),
    ("{{ 2.567 | round(1) }}{{ '7' | int + 1 }}", "2.68"),
    ("{{ {'a': [1]} | tojson }}{{ 'x' in ['x'] }}", '{"a": [1]}True'),
  ],
)  # fmt: skip
def test_ordinary_templates_render_as_ever(source, text):
  assert render(source) == text
