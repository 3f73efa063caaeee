"""Sessions by name: opened, finished once, ended when there are too many."""

import contextlib

import numpy as np
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from envs import base
from models.chat import word_chat
from rl.agents import session_tree, sessions
from rl.data import trajectory
from rl.engine import contract
from tests.helpers import searches

CHAT = word_chat.WordChat(("go", "yes"))
DONE = session_tree.Ending(reward=1.0)


def record(some, session):
  some.record(session, *answered(session))


def answer(session):
  session.record(*answered(session))


def answered(session):
  opening = session.begin([base.Message("user", "go")])
  completion = contract.Completion(
    tokens=np.array([4, 1], np.int32),
    logprobs=np.array([-0.5, 0.0], np.float32),
    versions=np.array([2, 2], np.int32),
    stop="stop",
    cached_tokens=0,
    decode_s=0.0,
  )
  return opening, completion, base.Message("assistant", "yes")


def opened(**settings):
  """Returns sessions and the list of their recorded trajectories."""
  kept = []
  return sessions.Sessions(CHAT, keep=kept.append, **settings), kept


def test_a_name_stands_for_one_session_until_it_is_finished():
  some, kept = opened()
  first = some.open("a/b".replace("/", "."))
  answer(first)
  assert some.open("a.b") is first
  assert some.get("a.b") is first
  assert some.holds(first)
  left = some.finish("a.b", DONE)
  assert kept == [left]
  assert [one.reward for one in left] == [1.0]
  assert not some.holds(first)
  for call in (lambda: some.open("a.b"), lambda: some.finish("a.b", DONE)):
    with pytest.raises(sessions.FinishedSession, match=r"a\.b is finished"):
      call()
  with pytest.raises(sessions.FinishedSession):
    some.get("a.b")
  assert len(kept) == 1


def test_nobody_but_its_owner_finds_a_session():
  some, _ = opened()
  mine = some.open("a", owner="me")
  assert some.open("a", owner="me") is mine
  for done in (False, True):
    for call in (
      lambda: some.open("a", owner="you"),
      lambda: some.get("a", "you"),
      lambda: some.finish("a", DONE, "you"),
    ):
      with pytest.raises(sessions.UnknownSession, match="no session a is open"):
        call()
    if not done:
      some.finish("a", DONE, "me")


def test_sessions_without_a_name_have_names_and_seeds_of_their_own():
  some, _ = opened()
  two = [some.open(), some.open()]
  assert two[0].name != two[1].name
  seeds = [s.begin([base.Message("user", "go")]).seed for s in two]
  assert seeds[0] != seeds[1]
  with pytest.raises(sessions.UnknownSession):
    some.finish("never", DONE)


@pytest.mark.parametrize("name", ["", "a/b", "a b", "é", "a\n", "x" * 201])
def test_names_that_no_path_can_hold_are_refused(name):
  with pytest.raises(ValueError, match="use 1 to 200 letters"):
    opened()[0].open(name)


def test_one_session_too_many_ends_the_one_that_was_silent_longest():
  some, kept = opened(max_sessions=2)
  answer(some.open("a"))
  answer(some.open("b"))
  some.open("a")
  some.open("c")
  assert len(some) == 2
  ((lost,),) = kept
  assert lost.task_id == "b"
  assert lost.status is trajectory.Status.TRUNCATED
  assert lost.reward is None
  with some.open("a").request_running(), some.open("c").request_running():
    with pytest.raises(sessions.TooManySessions, match="max_sessions=2"):
      some.open("d")
    assert some.get("a").running == 1
  some.open("d")
  # "a" had an answer, and "c", which came after it, had none.
  assert [left[0].task_id for left in kept] == ["b", "a"]
  assert some.close() == 0


def test_closing_keeps_what_was_not_finished():
  some, kept = opened()
  answer(some.open("a"))
  some.open("b")
  assert some.close() == 1
  assert [left[0].task_id for left in kept] == ["a"]
  assert len(some) == 0
  assert some.close() == 0


def test_one_session_that_cannot_be_kept_does_not_lose_others():
  kept = []

  def keep(branches):
    if branches[0].task_id == "a":
      raise OSError("no space")
    kept.append(branches[0].task_id)

  some = sessions.Sessions(CHAT, keep=keep)
  for name in ("a", "b"):
    answer(some.open(name))
  with pytest.raises(OSError, match="no space"):
    some.close()
  assert (kept, len(some)) == (["b"], 1)


class _Disk:
  """Keeps trajectories, but those of some sessions while it is full."""

  def __init__(self, *unkept):
    self.unkept, self.kept = set(unkept), []

  def keep(self, branches):
    if branches[0].task_id in self.unkept:
      raise OSError("no space")
    self.kept.append(branches[0].task_id)


def test_an_idle_session_that_cannot_be_kept_is_the_only_one_to_stay():
  now, disk = [0.0], _Disk("a")
  some = sessions.Sessions(
    CHAT, keep=disk.keep, max_idle_s=10.0, clock=lambda: now[0]
  )
  for name in ("a", "b"):
    answer(some.open(name))
  now[0] = 11.0
  some.open("c")
  assert disk.kept == ["b"]
  assert some.get("a").num_answers == 1
  with pytest.raises(OSError, match="no space"):
    some.finish("a", DONE)
  # It is tried again a minute after it failed.
  disk.unkept.clear()
  now[0] = 70.0
  assert some.get("a")
  now[0] = 72.0
  with pytest.raises(sessions.FinishedSession, match="ended after 10 s"):
    some.get("a")
  assert disk.kept == ["b", "a"]


def test_another_makes_room_for_a_session_that_cannot_be_kept(capsys):
  disk = _Disk("a")
  some = sessions.Sessions(CHAT, keep=disk.keep, max_sessions=2)
  for name in ("a", "b", "c"):
    answer(some.open(name))
  assert (disk.kept, len(some)) == (["b"], 2)
  assert "session a: no space" in capsys.readouterr().err
  disk.unkept.add("c")
  with pytest.raises(sessions.TooManySessions, match="cannot be recorded"):
    some.open("d")
  assert some.open("a").num_answers == some.open("c").num_answers == 1


def test_an_answer_stands_though_another_session_cannot_be_kept():
  disk = _Disk("a")
  some = sessions.Sessions(CHAT, keep=disk.keep, max_bytes=5000)
  session = some.open("a")
  record(some, session)
  # Of some 4,000 bytes each, two do not fit; "b" ends in the place of "a".
  record(some, some.open("b"))
  assert disk.kept == ["b"]
  assert session.num_answers == 1


def test_sessions_that_cannot_be_kept_do_not_grow_without_bound():
  disk = _Disk("a", "b")
  some = sessions.Sessions(CHAT, keep=disk.keep, max_bytes=130_000)
  for name in ("a", "b"):
    session = some.open(name)
    with session.request_running():
      while session.num_bytes <= 65_000:
        record(some, session)
  # Both failed to make room, and "c" would have to.
  with pytest.raises(sessions.TooManySessions, match="above 130000, and wait"):
    some.open("c")
  disk.unkept.clear()
  assert some.finish("a", DONE)
  assert some.open("c")


def test_a_session_without_answers_leaves_one_trajectory_without_turns():
  some, kept = opened()
  some.open("a")
  fault = session_tree.Ending(
    status=trajectory.Status.ENV_FAULT, fault="no game", task_id="t/1"
  )
  (left,) = some.finish("a", fault)
  assert (list(left.turns), left.fault, left.task_id) == ([], "no game", "t/1")
  assert kept == [[left]]


def test_a_session_stays_open_when_what_it_left_cannot_be_kept():
  def fail(left):
    raise OSError("no space")

  some = sessions.Sessions(CHAT, keep=fail)
  answer(some.open("a"))
  with pytest.raises(OSError, match="no space"):
    some.finish("a", DONE)
  assert some.get("a").num_answers == 1


def test_there_must_be_room_for_a_session():
  with pytest.raises(ValueError, match="max_sessions=0 must be at least 1"):
    sessions.Sessions(CHAT, max_sessions=0)


def test_whoever_holds_most_gives_way():
  some, kept = opened(max_sessions=3)
  answer(some.open("mine", owner="me"))
  for name in ("1", "2", "3", "4"):
    answer(some.open(name, owner="you"))
  assert [left[0].task_id for left in kept] == ["1", "2"]
  assert some.get("mine", "me").num_answers == 1
  with pytest.raises(sessions.FinishedSession, match="1 is ended to make room"):
    some.open("1", owner="you")


def test_a_session_without_use_ends_and_is_recorded():
  now = [0.0]
  some, kept = opened(max_idle_s=10.0, clock=lambda: now[0])
  answer(some.open("a"))
  with some.open("b").request_running():
    now[0] = 10.0
    some.open("c")
    assert len(some) == 3
    now[0] = 11.0
    with pytest.raises(sessions.FinishedSession, match="ended after 10 s with"):
      some.open("a")
    assert some.get("b").running == 1
  # It was in use until just now.
  some.open("d")
  assert some.get("b").running == 0
  now[0] = 22.0
  with pytest.raises(sessions.FinishedSession):
    some.get("b")
  assert [left[0].task_id for left in kept] == ["a"]
  assert len(some) == 0


def test_the_bytes_of_sessions_are_bounded():
  some, kept = opened()
  session = some.open("a")
  record(some, session)
  # 2 KB, a message and an answer of 1 KB each, and some numbers.
  size = some.num_bytes
  assert size == session.num_bytes
  assert 4000 <= size < 4100
  some, kept = opened(max_bytes=3 * size)
  for name in ("a", "b", "c"):
    record(some, some.open(name))
  assert not kept
  record(some, some.open("d"))
  assert [left[0].task_id for left in kept] == ["a"]
  assert some.num_bytes == 3 * size
  # One may hold a 16th.
  with pytest.raises(sessions.FullSession, match=f"d holds {size} bytes"):
    some.open("d")
  some.finish("d", DONE)
  assert some.num_bytes == 2 * size


class _Server(stateful.RuleBasedStateMachine):
  """Sessions of two owners under all bounds, and a model of what is open."""

  NAMES = st.sampled_from(["a", "b", "c", "d", "e"])
  OWNERS = st.sampled_from(["", "else"])

  @stateful.initialize(
    most=st.integers(1, 3),
    # An answer of these tests takes some 3,000 bytes.
    num_bytes=st.none() | st.integers(1_000, 100_000),
    idle_s=st.none() | st.integers(1, 5),
  )
  def begin(self, most, num_bytes, idle_s):
    self.now_s, self.most, self.num_bytes = 0.0, most, num_bytes
    self.kept, self.keeps = [], True
    self.seen, self.answers, self.waiting = [], 0, []
    self.some = sessions.Sessions(
      CHAT,
      max_sessions=most,
      max_bytes=num_bytes,
      max_idle_s=idle_s,
      keep=self._keep,
      clock=lambda: self.now_s,
    )

  def _keep(self, branches):
    if not self.keeps:
      raise OSError("the disk is full")
    self.kept += branches

  @contextlib.contextmanager
  def _refusals(self, *, keeps=False):
    """Lets the errors pass that a client is told.

    Args:
      keeps: also those of a disk, for the session that is to be kept.
    """
    refused = (
      sessions.FinishedSession,
      sessions.FullSession,
      sessions.TooManySessions,
      sessions.UnknownSession,
    )
    try:
      yield
    except refused:
      pass
    except OSError:
      assert keeps
      assert not self.keeps

  @stateful.rule(name=NAMES, owner=OWNERS)
  def ask(self, name, owner):
    with self._refusals():
      session = self.some.open(name, owner=owner)
      assert session.owner == owner
      if session not in self.seen:
        self.seen.append(session)
      running = contextlib.ExitStack()
      running.enter_context(session.request_running())
      self.waiting.append((session, answered(session), running))

  @stateful.precondition(lambda self: self.waiting)
  @stateful.rule(data=st.data())
  def answer(self, data):
    at = data.draw(st.integers(0, len(self.waiting) - 1), label="waiting")
    session, told, running = self.waiting.pop(at)
    with self._refusals(), running:
      was_open, before = self.some.holds(session), session.num_answers
      try:
        self.some.record(session, *told)
      finally:
        self.answers += session.num_answers - before
        assert session.num_answers - before == was_open

  @stateful.rule(name=NAMES, owner=OWNERS)
  def finish(self, name, owner):
    with self._refusals(keeps=True):
      self.some.finish(name, DONE, owner)

  @stateful.rule(seconds=st.integers(1, 6))
  def wait(self, seconds):
    self.now_s += seconds

  @stateful.rule()
  def break_or_mend_the_disk(self):
    self.keeps = not self.keeps

  @stateful.rule()
  def close(self):
    with self._refusals(keeps=True):
      self.some.close()

  @stateful.invariant()
  def every_answer_is_open_or_kept(self):
    if not hasattr(self, "some"):
      return
    still = [one for one in self.seen if self.some.holds(one)]
    assert len(still) == len(self.some) <= self.most
    assert self.some.num_bytes == sum(one.num_bytes for one in still)
    turns = sum(len(one.turns) for one in self.kept)
    assert turns + sum(one.num_answers for one in still) == self.answers

  def teardown(self):
    if hasattr(self, "some"):
      self.keeps = True
      self.some.close()
      assert len(self.some) == self.some.num_bytes == 0
      assert sum(len(one.turns) for one in self.kept) == self.answers


@pytest.mark.hypothesis
def test_no_order_of_requests_loses_an_answer_or_keeps_one_twice():
  searches.run(_Server, count=60, steps=40)
