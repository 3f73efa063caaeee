"""A plain class plays whole episodes, in the template of a real model."""

import dataclasses
import json
import pickle
import time

import pytest

from configs import counter
from envs import base, rows
from envs.tools import tool_environment
from rl.data import trajectory
from tests.helpers import scripted_chats

SOURCE = tool_environment.ToolEnvironment(make=counter.Counter)
TASK = SOURCE.task(0, "train")
TARGET = TASK.seed % 6 + 1


def add(step):
  return scripted_chats.calling("add", json.dumps({"step": step}))


DONE = scripted_chats.say("Done.")


def test_an_episode_of_the_guide_is_won_by_calling_its_tool():
  two = base.Message("assistant", "", add(TARGET).tool_calls * 2)
  played, text, shown = scripted_chats.play(SOURCE, two, add(-TARGET), DONE)
  assert played.status is trajectory.Status.COMPLETED, played.fault
  assert text.messages == [
    base.Message("user", f"Bring the counter to {TARGET}."),
    two,
    base.Message("tool", f"{TARGET}", name="add"),
    base.Message("tool", f"{2 * TARGET}", name="add"),
    add(-TARGET),
    base.Message("tool", f"{TARGET}", name="add"),
    DONE,
  ]
  assert text.step_rewards == [0.0, 0.0, 1.0]
  assert played.metrics == {"tool_calls": 3, "tool_errors": 0}
  system = shown.partition("<|im_start|>user")[0]
  assert '"description": "how much to add."' in system
  assert "get_reward" not in system
  assert f"<tool_response>\n{TARGET}\n</tool_response>" in shown


@pytest.mark.parametrize(
  "said",
  [
    "",
    "Done.",
    "<tool_call>",
    '<tool_call>{"name": "add"}</tool_call>',
    "get_reward()",
    "<think>add</think>",
  ],
)
def test_junk_ends_the_episode_and_earns_nothing(said):
  played, text, _ = scripted_chats.play(SOURCE, scripted_chats.say(said))
  assert played.status is trajectory.Status.COMPLETED
  assert text.step_rewards == [0.0]
  assert played.metrics == {"tool_calls": 0, "tool_errors": 0}


def test_wrong_calls_are_told_counted_and_change_nothing():
  wrong = [
    scripted_chats.calling("add", '{"step": "1"}'),
    scripted_chats.calling("add", "{}"),
    scripted_chats.calling("reset", '{"seed": 1}'),
    scripted_chats.calling("get_reward"),
    scripted_chats.calling("value"),
  ]
  _, text, _ = scripted_chats.play(SOURCE, *wrong, add(TARGET), DONE)
  results = [m.content for m in text.messages if m.role == "tool"]
  assert all(result.startswith("error: ") for result in results[:-1])
  assert results[-1] == f"{TARGET}"
  played, text, _ = scripted_chats.play(SOURCE, *wrong, DONE)
  assert played.metrics == {"tool_calls": 5, "tool_errors": 5}
  assert sum(text.step_rewards) == 0


def test_the_last_answer_that_is_allowed_is_graded_after_its_calls():
  short = tool_environment.ToolEnvironment(make=counter.Counter, max_turns=2)
  played, text, _ = scripted_chats.play(short, add(TARGET - 1), add(1))
  assert played.status is trajectory.Status.COMPLETED
  assert text.step_rewards == [0.0, 1.0]


def test_episodes_share_nothing_and_members_of_a_group_have_one_task():
  for _ in range(2):
    _, text, _ = scripted_chats.play(SOURCE, add(2), DONE)
    assert text.messages[2].content == "2"
    assert text.messages[0].content == f"Bring the counter to {TARGET}."


def test_the_seeds_of_the_splits_differ():
  seeds = {s: {SOURCE.task(i, s).seed for i in range(99)} for s in SPLITS}
  assert len(seeds["train"]) == len(seeds["eval"]) == 99
  assert not seeds["train"] & seeds["eval"]


SPLITS: tuple[base.Split, ...] = ("train", "eval")


def test_it_is_a_setting():
  assert SOURCE.name == "counter"
  assert hash(SOURCE) == hash(pickle.loads(pickle.dumps(SOURCE)))
  assert isinstance(SOURCE, base.Source)
  assert not isinstance(SOURCE, base.WordList)


class Playing:
  """Counts up to a row's goal; plays itself."""

  closed: list = []  # noqa: RUF012

  def reset(self, goal, seed):
    self.goal, self.value = goal, seed
    return f"Count to {goal}."

  def count(self) -> int:
    """Adds one."""
    self.value += 1
    return self.value

  def oracle(self):
    done = self.value == self.goal
    return "Done." if done else base.calling("count")

  def explore(self, seed):
    return f"{seed}?"

  def close(self):
    self.closed.append(self.value)


def two_goals():
  return [{"goal": 1}, {"goal": 2}]


GOALS = tool_environment.ToolEnvironment(
  make=Playing,
  rows=rows.Rows(data=two_goals, eval_data=two_goals),
  answer="goal",
)


def test_a_class_plays_itself_for_a_warm_start():
  # Row 1 begins at its seed, 1, and its goal is 2: one call, then the end.
  task, said = GOALS.task(1, "train"), [base.Message("user", "Count to 2.")]
  assert base.demonstrator(GOALS) is GOALS
  assert GOALS.oracle(task, said) == base.calling("count")
  said += [base.calling("count"), base.Message("tool", "2", name="count")]
  Playing.closed.clear()
  assert GOALS.oracle(task, said) == "Done."
  assert GOALS.explore(task, said, 5) == "5?"
  assert Playing.closed == [2, 2]
  with pytest.raises(ValueError, match=r"Counter .*want of a method oracle"):
    base.demonstrator(SOURCE)


def test_the_field_answer_is_for_rewards_that_compare():
  assert [GOALS.task(i, "eval").answer for i in range(3)] == ["1", "2", "1"]
  lacking = dataclasses.replace(GOALS, answer="gaol")
  with pytest.raises(ValueError, match=r"two_goals\[0\]: no field 'gaol'"):
    lacking.validate()
  with pytest.raises(ValueError, match="answer='x' is a field of rows"):
    tool_environment.ToolEnvironment(make=counter.Counter, answer="x")


class Desk:
  """Takes rows; opens something that must be closed."""

  log: list = []  # noqa: RUF012

  def reset(self, drawer, **row):
    self.drawer, self.row = drawer, row
    drawer.append("pen")
    return row.get("text")

  def get_reward(self):
    return self.row["won"]

  def look(self) -> list:
    """Looks into the drawer."""
    return self.drawer

  def close(self):
    self.log.append("closed")


def desk(tmp_path, *table, **settings):
  file = tmp_path / "desk.jsonl"
  file.write_text("".join(f"{json.dumps(row)}\n" for row in table))
  own = rows.Rows(data=str(file), eval_data=str(file))
  return tool_environment.ToolEnvironment(make=Desk, rows=own, **settings)


def test_reset_gets_a_row_of_its_own_and_the_object_is_closed(tmp_path):
  source = desk(tmp_path, {"drawer": ["cup"], "text": "Look.", "won": True})
  source.validate()
  Desk.log.clear()
  for _ in range(2):
    look = scripted_chats.calling("look")
    played, text, _ = scripted_chats.play(source, look, DONE)
    assert text.messages[2].content == '["cup", "pen"]'
    assert text.step_rewards == [0.0, 1.0]
    assert played.status is trajectory.Status.COMPLETED
  assert Desk.log == ["closed", "closed"]


@pytest.mark.parametrize(
  ("prompt", "text", "messages"),
  [
    ("Look. ", "Now.", [base.Message("user", "Look. Now.")]),
    ("Look.", None, [base.Message("user", "Look.")]),
    (
      [
        {"role": "system", "content": "Be quick."},
        {"role": "user", "content": "Go. "},
      ],
      "Now.",
      [base.Message("system", "Be quick."), base.Message("user", "Go. Now.")],
    ),
  ],
)
def test_the_prompt_of_a_row_comes_before_the_text_of_reset(
  tmp_path, prompt, text, messages
):
  row = {"drawer": [], "prompt": prompt, "text": text, "won": 0}
  source = desk(tmp_path, row)
  source.validate()
  _, said, _ = scripted_chats.play(source, DONE)
  assert said.messages[:-1] == messages


def test_a_system_message_comes_first(tmp_path):
  row = {"drawer": [], "text": "Look.", "won": 0}
  source = desk(tmp_path, row, system="Be brief.")
  _, said, _ = scripted_chats.play(source, DONE)
  assert said.messages[0] == base.Message("system", "Be brief.")


@pytest.mark.parametrize(
  ("change", "told"),
  [
    ({"text": None}, "reset returned None, and no row has a field prompt"),
    ({"text": 5}, "reset returned int, not a text"),
    ({"won": "yes"}, "reward is str, not a number"),
    ({"won": None}, "reward is None, not a number"),
  ],
)
def test_a_class_that_returns_nonsense_is_a_fault(tmp_path, change, told):
  row = {"drawer": [], "text": "Look.", "won": 1} | change
  played, _, _ = scripted_chats.play(desk(tmp_path, row), DONE)
  assert played.status is trajectory.Status.ENV_FAULT
  assert told in played.fault


def test_a_row_that_reset_cannot_take_is_named_before_a_run(tmp_path):
  source = desk(tmp_path, {"drawer": []}, {"desk": 1})
  told = r"desk.jsonl:2: no field 'drawer', which Desk.reset asks for"
  with pytest.raises(ValueError, match=told):
    source.validate()


class Bare:
  def look(self) -> str:
    """Looks."""
    return "nothing"


class Resting(Bare):
  def reset(self):
    return "Look."


class Sized(Resting):
  def __init__(self, size):
    self.size = size


class Asking(Bare):
  def reset(self, target):
    raise AssertionError


class AsyncReset(Bare):
  async def reset(self):
    raise AssertionError


class Door(Resting):
  def close(self, door: int):
    """Closes a door."""


class Asked(Resting):
  def oracle(self, question: str) -> str:
    """Asks the oracle."""
    return question


class Untyped(Resting):
  def shut(self, door):
    """Shuts a door."""


@pytest.mark.parametrize(
  ("settings", "told"),
  [
    ({"make": Bare}, "Bare has no reset"),
    ({"make": Bare()}, "must be a class"),
    ({"make": Sized}, "Sized is made without arguments.*: missing .* 'size'"),
    ({"make": Asking}, "no field 'target', which Asking.reset asks for"),
    ({"make": AsyncReset}, "AsyncReset.reset is a coroutine"),
    ({"make": Door}, "Door.close is called without arguments, and is no tool"),
    ({"make": Asked}, "Asked.oracle is called without arguments"),
    ({"make": Untyped}, "Untyped.shut: parameter door has no type"),
    ({"make": Resting, "max_turns": 0}, "max_turns=0 must be at least 1"),
    ({"make": Resting, "name": "a/b"}, "name='a/b'"),
  ],
)
def test_a_class_that_is_no_environment_is_refused_when_it_is_named(
  settings, told
):
  with pytest.raises(ValueError, match=told):
    tool_environment.ToolEnvironment(**settings)


def test_a_class_without_a_reward_leaves_it_to_the_run():
  source = tool_environment.ToolEnvironment(make=Resting)
  played, text, _ = scripted_chats.play(
    source, scripted_chats.calling("look"), DONE
  )
  assert played.status is trajectory.Status.COMPLETED
  assert text.messages[2].content == "nothing"
  assert text.step_rewards == [0.0, 0.0]


class Hanging(Resting):
  def look(self) -> str:
    """Sleeps."""
    time.sleep(0.2)
    return "late"


def test_a_tool_that_hangs_ends_the_episode_at_the_deadline_of_a_step():
  source = tool_environment.ToolEnvironment(make=Hanging)
  look = scripted_chats.calling("look")
  played, _, _ = scripted_chats.play(source, look, DONE, step_s=0.05)
  assert played.status is trajectory.Status.ENV_FAULT
  assert "step took over 0.05 s" in played.fault
