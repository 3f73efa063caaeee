"""Session trees: recorded ids, new ids and trajectories."""

import dataclasses
import json

import numpy as np
import pytest

from envs import base
from models.chat import hf_chat, word_chat
from rl.agents import session_tree
from rl.data import batch, trajectory
from rl.engine import contract
from rl.rollout import episode
from tests.helpers.chat_messages import GOLDEN

WORDS = word_chat.WordChat(("go", "on", "yes", "no"))
GO, ON, YES, NO = 3, 4, 5, 6
END, AGENT = word_chat.END, word_chat.AGENT
HF = hf_chat.HfChat.load(GOLDEN)
DONE = session_tree.Ending(reward=0.5, group_id=7, index=2)
ADD = {"type": "function", "function": {"name": "add", "parameters": {}}}


def user(text):
  return base.Message("user", text)


def said(text, *calls):
  return base.Message("assistant", text, calls)


def completion(*tokens, stop="stop", version=0, **changes):
  fields = {
    "tokens": np.array(tokens, np.int32),
    "logprobs": -np.arange(1, len(tokens) + 1, dtype=np.float32),
    "versions": np.full(len(tokens), version, np.int32),
    "stop": stop,
    "cached_tokens": 0,
    "decode_s": 0.25,
  }
  return contract.Completion(**{**fields, **changes})


class Talk:
  """A session with a clock."""

  def __init__(self, chat: episode.Chat = WORDS):
    self.now_s = 0.0
    self.session = session_tree.Session(
      "talk", chat, 5, clock=lambda: self.now_s
    )

  def ask(self, history, answer, *tokens, tools=(), **changes):
    """Records an answer; returns the ids of its request."""
    opening = self.session.begin(history, tools)
    self.now_s += 1.0
    self.session.record(opening, completion(*tokens, **changes), answer)
    return opening.tokens.tolist()

  def left(self, ending=DONE):
    return [
      [(t.context.tolist(), t.tokens.tolist()) for t in one.turns]
      for one in self.session.trajectories(ending)
    ]


def test_a_conversation_goes_on_with_the_ids_that_were_sampled():
  talk = Talk()
  first = talk.ask([user("go")], said("yes"), YES, END)
  talk.now_s += 2.5
  history = [user("go"), said("yes"), user("on")]
  second = talk.ask(history, said("no"), NO, END)
  assert first == [GO, AGENT]
  assert second == [GO, AGENT, YES, END, ON, AGENT]
  (one,) = talk.session.trajectories(DONE)
  assert one.ids.tolist() == [*second, NO, END]
  assert one.sampled.tolist() == [*[False] * 2, *[True] * 2] * 2
  assert [turn.env_s for turn in one.turns] == [2.5, 0.0]
  assert [turn.decode_s for turn in one.turns] == [0.25, 0.25]
  assert one.turns[0].logprobs.tolist() == [-1.0, -2.0]
  assert (one.reward, one.status.value) == (0.5, "completed")
  assert (one.task_id, one.group_id, one.index) == ("talk", 7, 2)


def test_sampled_ids_stay_even_where_their_text_would_be_encoded_otherwise():
  talk, known = Talk(HF), [HF.token(i) for i in range(260, 300)]
  text = next(token for token in known if token.isalpha() and token.isascii())
  whole = HF.encode_answer(text).tolist()
  # One id per byte, which no encoder would choose.
  bytes_ = [HF.encode_answer(character).tolist()[0] for character in text]
  assert len(bytes_) > len(whole) - 1
  talk.ask([user("hi")], said(text), *bytes_, HF.stop_ids[0])
  ids = talk.ask([user("hi"), said(text), user("and?")], said("x"), *whole)
  start = len(HF.open([user("hi")]))
  assert ids[start : start + len(bytes_)] == bytes_


def test_an_answer_that_was_cut_off_is_ended_by_the_template():
  talk = Talk(HF)
  cut = HF.encode_answer("not don").tolist()[:-1]
  talk.ask([user("hi")], said("not don"), *cut, stop="length")
  ids = talk.ask([user("hi"), said("not don"), user("go")], said("x"), *cut)
  start = len(HF.open([user("hi")])) + len(cut)
  assert ids[start] == HF.stop_ids[0]
  (one,) = talk.session.trajectories(DONE)
  assert one.ids.tolist() == [*ids, *cut]
  assert not one.sampled[start]


@pytest.mark.parametrize(
  ("changed", "same"),
  [
    (said("yes"), True),
    (said(" yes\n"), True),
    (dataclasses.replace(said("yes"), reasoning="so"), True),
    (said("no"), False),
    (said("yes yes"), False),
    (base.Message("user", "yes"), False),
  ],
)
def test_white_space_and_thinking_are_no_edits_of_an_answer(changed, same):
  talk = Talk()
  talk.ask([user("go")], said("yes"), YES, END)
  talk.ask([user("go"), changed, user("on")], said("no"), NO, END)
  assert (len(talk.left()) == 1) == same


def test_calls_are_the_same_however_their_json_is_written():
  call = base.ToolCall("add", '{"a": 1, "b": 2}', "call_0")
  ids = HF.encode_answer("x").tolist()
  for arguments, tools, same in (
    ('{"b":2,"a":1}', [ADD], True),
    ('{"a": 1, "b": 3}', [ADD], False),
    ("{", [ADD], False),
    ('{"a": 1, "b": 2}', [], False),
  ):
    talk = Talk(HF)
    talk.ask([user("go")], said("", call), *ids, tools=[ADD])
    again = base.ToolCall("add", arguments, "another")
    result = base.Message("tool", "3", tool_call_id="another")
    history = [user("go"), said("", again), result]
    talk.ask(history, said("x"), *ids, tools=tools)
    assert (len(talk.left()) == 1) == same


def test_a_second_way_on_is_a_branch_with_the_past_as_context():
  talk = Talk()
  talk.ask([user("go")], said("yes"), YES, END)
  past = [user("go"), said("yes")]
  talk.ask([*past, user("on")], said("no"), NO, END)
  talk.ask([*past, user("go")], said("yes"), YES, END)
  talk.ask([*past, user("go"), said("yes"), user("no")], said("on"), ON, END)
  # The first request again, as a client retries after a lost reply.
  talk.ask([user("go")], said("no"), NO, END)
  assert talk.left() == [
    [([GO, AGENT], [YES, END]), ([ON, AGENT], [NO, END])],
    [
      ([GO, AGENT, YES, END, GO, AGENT], [YES, END]),
      ([NO, AGENT], [ON, END]),
    ],
    [([GO, AGENT], [NO, END])],
  ]
  ids = [x for branch in talk.left() for _, tokens in branch for x in tokens]
  assert len(ids) == 2 * talk.session.num_answers


def test_of_two_answers_with_the_same_text_the_later_one_goes_on():
  talk = Talk()
  talk.ask([user("go")], said("yes"), YES, END)
  talk.ask([user("go")], said("yes"), YES, YES, stop="length")
  history = [user("go"), said("yes"), user("on")]
  assert talk.ask(history, said("no"), NO)[2:4] == [YES, YES]


def test_a_changed_answer_is_context_of_a_conversation_of_its_own():
  talk = Talk()
  talk.ask([user("go")], said("yes"), YES, END)
  ids = talk.ask([user("go"), said("no"), user("on")], said("no"), NO, END)
  assert ids == [GO, AGENT, NO, END, ON, AGENT]
  assert talk.left()[1] == [(ids, [NO, END])]


def test_an_answer_of_the_first_request_is_an_example_and_context():
  talk = Talk()
  shown = [user("go"), said("yes"), user("on")]
  ids = talk.ask(shown, said("no"), NO, END)
  assert ids == [GO, AGENT, YES, END, ON, AGENT]
  more = talk.ask([*shown, said("no"), user("go")], said("no"), NO, END)
  assert more == [*ids, NO, END, GO, AGENT]
  assert len(talk.left()) == 1


def test_ids_go_on_behind_the_ids_they_begin_with():
  talk = Talk()

  def ask(ids, *tokens):
    opening = talk.session.begin_ids(np.array(ids, np.int32))
    talk.session.record(opening, completion(*tokens), None)
    return opening.context.tolist()

  assert ask([GO, AGENT], YES, END) == [GO, AGENT]
  assert ask([GO, AGENT, YES, END, ON], NO) == [ON]
  assert ask([GO, AGENT, YES, YES], NO) == [GO, AGENT, YES, YES]
  assert ask([GO], NO) == [GO]
  assert [len(branch) for branch in talk.left()] == [2, 1, 1]
  # Messages never match a conversation that came as ids.
  assert talk.ask([user("go")], said("no"), NO) == [GO, AGENT]
  assert len(talk.left()) == 4


def test_requests_have_seeds_that_repeat_in_a_rerun():
  seeds = []
  for _ in range(2):
    talk = Talk()
    seeds.append([talk.session.begin([user("go")]).seed for _ in range(3)])
  assert seeds[0] == seeds[1]
  assert len(set(seeds[0])) == 3
  assert all(0 <= seed < 2**31 for seed in seeds[0])


def test_a_branch_that_was_aborted_is_a_fault_without_a_reward():
  talk = Talk()
  talk.ask([user("go")], said("yes"), YES, stop="abort")
  talk.ask([user("on")], said("no"), NO, END)
  broken, whole = talk.session.trajectories(DONE)
  assert broken.status is trajectory.Status.ENGINE_FAULT
  assert (broken.reward, broken.fault) == (None, "aborted")
  assert broken.num_sampled == 1
  assert whole.reward == 0.5


def test_experts_of_the_last_id_come_with_the_next_turn():
  def experts(count, known):
    routes = np.arange(count, dtype=np.int32).reshape(count, 1, 1)
    return np.where(np.arange(count)[:, None, None] < known, routes, -1)

  talk = Talk()
  history = [user("go"), said("yes"), user("on")]
  talk.ask([user("go")], said("yes"), YES, END, experts=experts(4, 3))
  talk.ask(history, said("no"), NO, END, experts=experts(8, 7))
  (one,) = talk.session.trajectories(DONE)
  assert one.experts is not None
  assert one.experts[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, -1]


def test_what_is_left_packs_and_survives_json():
  talk = Talk()
  talk.ask([user("go")], said("yes"), YES, END, version=3)
  talk.ask([user("go"), said("yes"), user("on")], said("no"), NO, version=4)
  left = talk.session.trajectories(DONE)
  (packed,) = batch.pack(left, rows=1, length=8, version=4).batches
  assert packed.sampled[0].sum() == 3
  assert packed.versions[0][packed.sampled[0]].tolist() == [3, 3, 4]
  text = json.dumps(trajectory.trajectory_to_json(left[0]))
  again = trajectory.trajectory_from_json(json.loads(text))
  assert again.ids.tolist() == left[0].ids.tolist()


def test_what_cannot_be_encoded_is_refused_and_leaves_no_trace():
  talk = Talk()
  with pytest.raises(ValueError, match="word 'maybe' is not among"):
    talk.session.begin([user("maybe")])
  with pytest.raises(ValueError, match="has no tools"):
    talk.session.begin([user("go")], [ADD])
  call = base.ToolCall("add", "{}")
  with pytest.raises(ValueError, match="has no tools"):
    talk.session.begin([user("go"), said("", call), user("on")])
  assert talk.session.num_answers == 0


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"reward": float("nan")}, "reward nan is not a finite number"),
    ({"parts": {"x": float("inf")}}, "part x of the reward inf"),
    (
      {"reward": 1.0, "status": trajectory.Status.ENV_FAULT},
      "a fault has no reward",
    ),
  ],
)
def test_rewards_that_are_none_are_refused(changes, words):
  with pytest.raises(ValueError, match=words):
    session_tree.Ending(**changes)
