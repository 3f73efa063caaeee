import asyncio
import importlib.util
import sys

import pytest

from envs import base
from envs.suites import bfcl

needs_package = pytest.mark.skipif(
  importlib.util.find_spec("bfcl_eval") is None,
  reason="bfcl-eval is not installed: make bfcl",
)
CATEGORIES = ("base", "miss_func", "miss_param", "long_context")


def called(name, arguments="{}"):
  return base.Message("assistant", "", (base.ToolCall(name, arguments),))


def idle(task, messages):
  return base.Message("assistant", "I cannot do that.")


def played(source, tasks, agent):
  """Returns (reward, metrics, messages) of each task, played side by side."""

  async def one(task):
    env, reward, metrics, done = source(task), 0.0, {}, False
    messages = list(await env.start())
    while not done:
      answer = agent(task, messages)
      step = await env.step(answer)
      messages += [answer, *step.messages]
      reward, done = reward + step.reward, step.done
      for key, value in step.metrics.items():
        metrics[key] = metrics.get(key, 0) + value
    await env.close()
    return reward, metrics, messages

  async def all_of():
    return await asyncio.gather(*map(one, tasks))

  return asyncio.run(all_of())


def test_a_run_without_the_package_is_told_how_to_install_it(monkeypatch):
  monkeypatch.setitem(sys.modules, "bfcl_eval", None)
  with pytest.raises(ValueError, match="pip install --no-deps bfcl-eval"):
    bfcl.MultiTurn()


@pytest.mark.parametrize("steps", [0, 1])
def test_a_request_needs_two_answers(steps):
  with pytest.raises(ValueError, match=f"max_steps={steps}.*at least 2"):
    bfcl.MultiTurn(max_steps=steps)


@needs_package
@pytest.mark.parametrize("category", CATEGORIES)
def test_every_reference_solution_pays_and_doing_nothing_never(category):
  source = bfcl.MultiTurn(category=category)
  tasks = [source.task(i, s) for i in range(100) for s in ("train", "eval")]
  assert len({task.seed for task in tasks}) == 200
  solved = played(source, tasks, source.oracle)
  assert [reward for reward, _, _ in solved] == [1.0] * 200
  assert [reward for reward, _, _ in played(source, tasks, idle)] == [0.0] * 200


@needs_package
@pytest.mark.parametrize("category", CATEGORIES)
def test_a_category_passes_all_checks_of_a_trial(faults_of, category):
  source = bfcl.MultiTurn(category=category)
  assert not faults_of(source, source.oracle)


@needs_package
def test_the_halves_are_by_number_in_every_category():
  for category in CATEGORIES:
    source = bfcl.MultiTurn(category=category)
    assert {source.task(i, "train").seed % 2 for i in range(200)} == {0}
    assert {source.task(i, "eval").seed % 2 for i in range(200)} == {1}
    # After the last the first comes again, under another id.
    assert source.task(100, "eval").seed == source.task(0, "eval").seed
    assert source.task(100, "eval").id != source.task(0, "eval").id


@needs_package
def test_the_first_request_that_is_not_met_ends_the_episode():
  source = bfcl.MultiTurn()
  task = source.task(0, "train")

  def then_nothing(task, messages):
    first = sum(m.role == "user" for m in messages) == 1
    return (source.oracle if first else idle)(task, messages)

  ((reward, metrics, messages),) = played(source, [task], then_nothing)
  assert reward == 0.0
  # cd, mkdir and mv meet the first of four requests.
  assert metrics == {"requests_met": 1, "tool_calls": 3, "tool_errors": 0}
  assert [m.role for m in messages].count("user") == 2


@needs_package
def test_a_change_that_nobody_asked_for_is_not_met():
  source = bfcl.MultiTurn()

  def also_makes_a_directory(task, messages):
    if messages[-1].role == "user":
      own = source.oracle(task, messages).tool_calls
      extra = base.ToolCall("mkdir", '{"dir_name": "extra"}')
      return base.Message("assistant", "", (*own, extra))
    return idle(task, messages)

  ((reward, metrics, _),) = played(
    source, [source.task(0, "train")], also_makes_a_directory
  )
  assert reward == 0.0
  assert "requests_met" not in metrics


@needs_package
def test_answers_to_one_request_are_counted():
  source = bfcl.MultiTurn(max_steps=3)
  ((reward, metrics, _),) = played(
    source, [source.task(0, "train")], lambda *said: called("pwd")
  )
  assert reward == 0.0
  assert metrics == {"tool_calls": 3, "tool_errors": 0}


@needs_package
@pytest.mark.parametrize(
  ("call", "words"),
  [
    (called("_load_scenario"), "there is no function '_load_scenario'"),
    (called("__init__"), "there is no function '__init__'"),
    (called("cd", "[1]"), "the arguments must be a JSON object"),
    (called("cd", "{"), "Expecting property name"),
    (called("cd", '{"x": 1}'), "unexpected keyword argument"),
    (called("cd", '{"folder": {}}'), "no attribute"),
  ],
)
def test_a_wrong_call_is_told_and_counted(call, words):
  source = bfcl.MultiTurn(max_steps=2)
  ((reward, metrics, messages),) = played(
    source, [source.task(0, "train")], lambda *said: call
  )
  assert messages[2].content.startswith("Error during execution: ")
  assert words in messages[2].content
  assert (reward, metrics["tool_errors"]) == (0.0, 2)


@needs_package
def test_mathematics_neither_hangs_nor_changes_the_precision_of_others():
  import mpmath

  tools = bfcl._Tools({"id": "x", "involved_classes": ["MathAPI"]})
  huge = tools.call("power", {"base": 9, "exponent": 999_999_999})
  assert huge == "Error during execution: exponent must be at most 1000"
  fine = {"value": 2, "base": 10, "precision": 10**9}
  assert "precision must be at most" in tools.call("logarithm", fine)
  before = mpmath.mp.dps
  # log10(2) is 0.30103, here to five places.
  assert "0.3010" in tools.call("logarithm", {**fine, "precision": 5})
  assert mpmath.mp.dps == before
  assert tools.call("power", {"base": 3, "exponent": 4}) == '{"result": 81}'


@needs_package
def test_a_function_that_comes_late_is_described_by_the_user():
  source = bfcl.MultiTurn(category="miss_func")
  task = source.task(0, "train")
  ((_, _, messages),) = played(source, [task], source.oracle)
  env = source(task)
  asyncio.run(env.start())
  assert "sort" not in [tool["function"]["name"] for tool in env.tools]
  late = [m.content for m in messages if "more functions" in m.content]
  assert len(late) == 1
  assert '"name": "sort"' in late[0]


@needs_package
def test_tools_have_schemas_of_json():
  source = bfcl.MultiTurn()
  env = source(source.task(0, "train"))
  asyncio.run(env.start())
  kinds = {
    value["type"]
    for tool in env.tools
    for value in tool["function"]["parameters"]["properties"].values()
  }
  assert kinds <= {"string", "integer", "number", "boolean", "array", "object"}
  assert all(t["function"]["parameters"]["type"] == "object" for t in env.tools)
