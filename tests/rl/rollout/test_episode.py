"""Tests of environments that break their contract in the midst of playing."""

import asyncio
import dataclasses
import math
from typing import Any, cast

import numpy as np
import pytest

from envs import base
from models.chat import hf_chat, word_chat
from rl.data import batch, trajectory
from rl.rollout import episode
from rl.runtime import logical_clock
from rl.testing import fakes, scripted_engine
from tests.helpers import chat_messages

CHAT = word_chat.WordChat(("go", "on", "yes", "no"))


SAY_YES = scripted_engine.one_of((5,), word_chat.END)
SAID = [base.Message("user", "on")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Foreign(fakes.Counting):
  """Environments of which a method is a function of the test."""

  admit: Any = None
  start: Any = None
  step: Any = None

  def __call__(self, task):
    environment = super().__call__(task)
    for name in ("admit", "start", "step"):
      if getattr(self, name) is not None:
        setattr(environment, name, getattr(self, name))
    return environment


def play(source, engine=None, loop_factory=None, **limits):
  """Plays one episode; 60 s of deadline are never waited for."""
  task = source.task(0, "train")
  partial = episode.PartialTrajectory(episode.Episode(task, 3, 0, 0))
  engine = engine or scripted_engine.ScriptedEngine(SAY_YES)
  settings = episode.Limits(**limits)
  with asyncio.Runner(loop_factory=loop_factory) as runner:
    played, _ = runner.run(
      episode.play(source, engine.generate, CHAT, settings, partial)
    )
  return played


@pytest.mark.parametrize(
  ("limits", "unanswered"),
  # "go", <agent>; "yes", <end>; "on", <agent>: the fifth id is the first of
  # the two that were not answered.
  [({"max_turns": 1}, [4, 2]), ({"max_tokens": 5}, [4])],
)
def test_a_cut_episode_keeps_what_it_had_no_answer_to(limits, unanswered):
  cut = play(Foreign(step=returning(base.Step(SAID, 0.0, False))), **limits)
  assert cut.status is trajectory.Status.TRUNCATED
  assert cut.ids.tolist() == [3, 2, 5, 1]
  assert cut.unanswered.tolist() == unanswered


def test_an_episode_that_ended_has_nothing_to_answer():
  ended = play(Foreign())
  assert ended.status is trajectory.Status.COMPLETED
  assert ended.unanswered.tolist() == []


def returning(value):
  async def call(*args):
    return value

  return call


def raising(error):
  def call(*args):
    raise error

  return call


class Leaving(list):
  """A list that ends the process when it is read."""

  def __iter__(self):
    raise SystemExit


@pytest.mark.parametrize(
  ("start", "words"),
  [
    (returning(None), "start returned None, not a list of messages"),
    (returning((SAID, 1)), "start returned list in place of a Message"),
    (returning("go"), "start returned str in place of a Message"),
    (returning([{"role": "user"}]), "returned dict in place of a Message"),
    (returning([base.Message("user", cast(Any, None))]), "content is None"),
    (returning([base.Message(cast(Any, "bot"), "go")]), "of role 'bot'"),
    (raising(OSError("no game")), "start raised OSError: no game"),
    (raising(SystemExit("quit")), "start raised SystemExit: quit"),
    (returning(Leaving()), "start returned messages, which raised SystemExit"),
    (lambda: 5, "start is no coroutine, it returned int; write async def"),
    (cast(Any, 5), "start raised TypeError"),
  ],
)
def test_a_start_that_returns_nonsense_is_a_fault(start, words):
  member = play(Foreign(start=start))
  assert member.status is trajectory.Status.ENV_FAULT
  assert words in member.fault
  assert not member.turns


@pytest.mark.parametrize(
  ("step", "words"),
  [
    (returning(None), "step returned None, not a Step"),
    (returning((SAID, 1.0, True)), "step returned tuple, not a Step"),
    (returning(base.Step(cast(Any, None), 1.0, True)), "step returned None"),
    (
      returning(base.Step(cast(Any, ["on"]), 1.0, True)),
      "str in place of a Message",
    ),
    (returning(base.Step(SAID, cast(Any, [1.0]), True)), "reward is list, not"),
    (returning(base.Step(SAID, 1e39, True)), "reward 1e+39 is not"),
    (returning(base.Step(SAID, 10**400, True)), "is not a finite number"),
    (returning(base.Step(SAID, 1.0, cast(Any, "no"))), "done=str, not a bool"),
    (
      returning(base.Step(SAID, 1.0, True, {"errors": math.nan})),
      "metric 'errors' nan is not a finite number",
    ),
    (
      returning(base.Step(SAID, 1.0, True, cast(Any, [1.0]))),
      "metrics=list, not a mapping",
    ),
    (raising(OSError("no game")), "step raised OSError: no game"),
    (raising(asyncio.CancelledError()), "step raised CancelledError"),
    (raising(SystemExit("quit")), "step raised SystemExit: quit"),
    (lambda answer: 5, "step is no coroutine, it returned int"),
  ],
)
def test_a_step_that_returns_nonsense_is_a_fault_and_keeps_the_tokens(
  step, words
):
  member = play(Foreign(step=step))
  assert member.status is trajectory.Status.ENV_FAULT
  assert words in member.fault
  assert member.num_sampled == 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Builds(fakes.Counting):
  built_as: Any

  def __call__(self, task):
    return self.built_as


class Half:
  async def start(self):
    raise AssertionError

  step = start


@pytest.mark.parametrize(
  ("built", "words"),
  [
    (None, "None, not an environment: it has no start, step, close"),
    (Foreign, "the class Foreign; call it"),
    (Half(), "Half, not an environment: it has no close"),
  ],
)
def test_a_source_that_builds_no_environment_is_a_fault(built, words):
  member = play(Builds(built_as=built))
  assert member.status is trajectory.Status.ENV_FAULT
  assert member.fault == f"building it returned {words}"


def test_an_environment_whose_helper_was_cancelled_does_not_stall_its_group():
  async def step(answer):
    helper = asyncio.create_task(asyncio.sleep(60))
    asyncio.get_running_loop().call_soon(helper.cancel)
    await helper

  member = play(Foreign(step=step))
  assert member.status is trajectory.Status.ENV_FAULT
  assert "step raised CancelledError" in member.fault


def test_an_environment_may_wait_for_room_longer_than_for_a_call():
  async def admit():
    await asyncio.sleep(0.3)

  member = play(Foreign(admit=admit), step_s=0.2)
  assert member.status is not trajectory.Status.ENV_FAULT


def test_an_environment_that_is_not_admitted_is_a_fault():
  member = play(Foreign(admit=raising(OSError("full"))))
  assert member.status is trajectory.Status.ENV_FAULT
  assert member.fault.startswith("admit raised OSError: full (")


def test_a_repeatable_run_refuses_to_wait_for_room():
  # Who has room is held for a checkpoint, and who waits for it would wait on.
  async def admit():
    pass

  loop_factory = logical_clock.LogicalEventLoop
  member = play(Foreign(admit=admit), loop_factory=loop_factory)
  assert member.status is trajectory.Status.ENV_FAULT
  assert "waits for others in admit; use repeatable=false" in member.fault


def test_a_first_observation_without_room_for_an_answer_is_a_fault():
  # Four words and <agent> are 5 ids: they fit, but no token behind them.
  start = returning([base.Message("user", "go go go go")])
  member = play(Foreign(start=start), max_tokens=5)
  assert member.status is trajectory.Status.ENV_FAULT
  assert "5 ids" in member.fault
  assert "rollout.max_tokens=5" in member.fault


class Routed(scripted_engine.ScriptedEngine):
  """Expert j of layer s is id + s + j, and one more for each answer before."""

  def __init__(self, experts: tuple[int, int] | None = (2, 2)):
    super().__init__(SAY_YES, experts=experts)

  async def generate(self, request):
    answer = await super().generate(request)
    self.version += 1
    return answer


def test_experts_of_a_token_are_those_it_was_sampled_with():
  member = play(fakes.Counting(turns=2), Routed(), record_experts=True)
  # go <agent> yes <end> | on <agent> yes <end>. The first <end> is fed by the
  # second answer, whose routers are one on; the last <end> never is.
  later = [0, 0, 0, 1, 1, 1, 1]
  expected = [*(member.ids[:7] + later).tolist(), -1]
  experts: Any = member.experts
  assert experts.shape == (8, 2, 2)
  assert experts[:, 0, 0].tolist() == expected
  assert experts[:7, 1, 1].tolist() == (experts[:7, 0, 0] + 2).tolist()
  assert (experts[7] == -1).all()


def test_experts_that_were_recorded_are_kept():
  class Knowing(Routed):
    """Knows the first layer of an id that was never fed."""

    async def generate(self, request):
      answer = await super().generate(request)
      experts: Any = answer.experts
      experts[-1, 0] = 9
      return answer

  member = play(fakes.Counting(turns=2), Knowing(), record_experts=True)
  experts: Any = member.experts
  fed = word_chat.END + 1 + 1  # Layer 1, after one answer.
  assert experts[3].tolist() == [[9, 9], [fed, fed + 1]]
  assert experts[7].tolist() == [[9, 9], [-1, -1]]


def test_a_batch_carries_the_experts_of_an_episode():
  member = play(fakes.Counting(turns=2), Routed(), record_experts=True)
  (packed,) = batch.pack([member], rows=1, length=10, version=0).batches
  experts: Any = packed.experts
  np.testing.assert_array_equal(experts[0, :8], member.experts)
  assert (experts[0, 8:] == -1).all()


def test_experts_are_recorded_when_asked_for_only():
  member = play(fakes.Counting(turns=2), Routed())
  assert member.experts is None


def test_an_engine_that_knows_no_experts_says_so():
  member = play(fakes.Counting(), Routed(None), record_experts=True)
  assert member.status is trajectory.Status.ENGINE_FAULT
  assert "experts are not recorded" in member.fault


def test_an_answer_that_was_aborted_ends_the_episode_and_keeps_its_tokens():
  class Aborting(scripted_engine.ScriptedEngine):
    async def generate(self, request):
      answer = asyncio.create_task(super().generate(request))
      await asyncio.sleep(0)
      self.abort(request.request_id)
      return await answer

  member = play(fakes.Counting(), Aborting(SAY_YES))
  assert member.status is trajectory.Status.ENGINE_FAULT
  assert (member.fault, member.num_sampled) == ("aborted", 1)


NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
TOOL = {
  "type": "function",
  "function": {
    "name": "add",
    "parameters": {"type": "object", "properties": NUMBERS},
  },
}


class Calculator:
  """Asks for a sum; its tool is called once."""

  name = "calculator"
  tools = (TOOL,)

  def __init__(self):
    self.heard = []

  def task(self, index, split):
    return base.Task(f"{self.name}/{split}/{index}", index, split, index)

  def __call__(self, task):
    return self

  async def start(self):
    return [base.Message("user", "2 + 3?")]

  async def step(self, answer):
    self.heard.append(answer)
    done = len(self.heard) == 2
    result = [] if done else [base.Message("tool", "5", name="add")]
    return base.Step(result, 1.0, done, {"calls": len(answer.tool_calls)})

  async def close(self):
    pass


@pytest.mark.parametrize("opens", ["", "<think>\n"])
def test_a_given_answer_is_parsed_as_it_was_given(opens):
  chat = hf_chat.HfChat.load(chat_messages.GOLDEN)
  prompt = f"{{% if add_generation_prompt %}}{opens}{{% endif %}}"
  template = dataclasses.replace(
    chat.template, source=chat.template.source + prompt
  )
  chat = dataclasses.replace(chat, template=template)
  assert chat.thinks == bool(opens)
  call = base.ToolCall("add", '{"a": 2}')
  for given in (
    base.Message("assistant", "5"),
    base.Message("assistant", "5", reasoning="a sum"),
    base.Message("assistant", "", (call,)),
  ):
    tokens = episode.given_answer(chat, given).tokens
    assert episode.as_message(chat.parse(tokens)) == given
  tokens = episode.given_answer(chat, "5").tokens
  assert chat.parse(tokens).content == "5"


@pytest.mark.parametrize("form", ["", *chat_messages.FORMS])
def test_tools_are_shown_called_and_counted(form):
  chat = hf_chat.HfChat.load(chat_messages.GOLDEN)
  chat = chat_messages.chat_of_form(form) if form else chat
  call = base.ToolCall("add", '{"a": 2, "b": 3}')
  said = [
    base.Message("assistant", "", (call,), reasoning="a sum"),
    base.Message("assistant", "It is 5."),
  ]
  answers = iter([episode.given_answer(chat, m).tokens.tolist() for m in said])
  engine = scripted_engine.ScriptedEngine(lambda request: next(answers))
  source = Calculator()
  task = source.task(0, "train")
  partial = episode.PartialTrajectory(episode.Episode(task, 3, 0, 0))
  limits = episode.Limits(turn_tokens=200, max_tokens=2000)
  played, transcript = asyncio.run(
    episode.play(source, engine.generate, chat, limits, partial)
  )
  assert played.status is trajectory.Status.COMPLETED, played.fault
  assert source.heard == said
  assert transcript.messages == [
    base.Message("user", "2 + 3?"),
    said[0],
    base.Message("tool", "5", name="add"),
    said[1],
  ]
  assert played.metrics == {"calls": 1}
  shown = "".join(chat.token(i) for i in played.ids.tolist())
  assert '"name": "add"' in shown.partition("<|im_start|>user")[0]
  assert "<tool_response>\n5\n</tool_response>" in shown


@pytest.mark.parametrize(
  ("tools", "words"),
  [
    (5, "tools are int, not a list"),
    ("add", "tools are str, not a list"),
    ([{"name": "add"}], "has no name; use the form of the OpenAI API"),
    ([{"function": {"name": 1}}], "has no name"),
    ([object()], "its tools raised TypeError"),
    ([TOOL], "1 tools cannot be shown in a list of words"),
  ],
)
def test_tools_that_cannot_be_shown_are_a_fault(tools, words):
  source = Calculator()
  source.tools = tools
  played = play(source)
  assert played.status is trajectory.Status.ENV_FAULT
  assert words in played.fault
