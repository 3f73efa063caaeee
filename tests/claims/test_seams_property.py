"""The seams of the loop, searched: gate, buffer, router, lost engines."""

import asyncio
import dataclasses

import hypothesis
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from envs import base
from models.chat import word_chat
from rl.audit import checker as checker_lib
from rl.audit import token_ledger
from rl.data import trajectory
from rl.pools import placement, recovery
from rl.schedule import group_buffer, overlap, staleness_gate
from rl.simulation import learner as simulated_learner
from rl.testing import fakes, scripted_engine
from tests.helpers import players_under_test as players
from tests.helpers import searches, virtual_run

QUICK = recovery.Recovery(first_wait_s=1.0, start_s=500.0, attempts=50)
INFO = placement.EngineInfo("decode", "any")


def _starting():
  say = scripted_engine.one_of((players.YES, players.NO), word_chat.END)
  return scripted_engine.ScriptedEngine(
    say, lambda request, i: float(i), start_s=2.0, update_s=0.5
  )


def _disturbing(steps):
  """Returns what does (seconds to wait, action, number) one after the other.

  Where engines are lost, one of the run's own never leaves: nobody starts those
  again that have joined, so that a run can lose its last engine.
  """
  loses = any(action == "lose" for _, action, _ in steps)

  async def disturb(run):
    leaves, own = [], set(run.router.serving)
    for wait_s, action, number in steps:
      await asyncio.sleep(wait_s)
      serving = list(run.router.serving)
      if not serving:
        continue
      one = serving[number % len(serving)]
      match action:
        case "lose":
          await run.router.engines[one].close()
        case "abort":
          run.router.engines[one].abort(None)
        case "join":
          run.members.join(run.build_more, INFO)
        case "leave" if len(serving) > 1 and (own - {one} or not loses):
          own.discard(one)
          leaves.append(asyncio.ensure_future(run.members.leave(one)))
    try:
      await asyncio.Event().wait()
    finally:
      for leave in leaves:
        leave.cancel()

  return disturb


DELAYS = st.lists(st.sampled_from([0.0, 0.5, 1.0, 7.0, 40.0]), min_size=1)
STEPS = st.lists(
  st.tuples(
    st.sampled_from([0.0, 0.3, 1.0, 2.5, 10.0]),
    st.sampled_from(["abort", "lose", "join", "leave"]),
    st.integers(0, 2),
  ),
  max_size=6,
)
FAULTS = ["", "start", "step", "close", "hang", "hang_close", "nan"]


@searches.examples(40)
# Both engines are lost while a round is published: what waits for them begins
# with weights of the next one.
@hypothesis.example(
  name="one step off",
  rounds=3,
  num_engines=2,
  group_size=2,
  turns=1,
  fault="",
  delays=[0.0],
  update_s=0.0,
  transfer_s=0.0,
  train_s=0.0,
  steps=[(0.0, "lose", 0), (0.3, "lose", 0)],
)
@hypothesis.given(
  name=st.sampled_from(sorted(virtual_run.SCHEDULES)),
  rounds=st.integers(1, 4),
  num_engines=st.integers(1, 3),
  group_size=st.integers(2, 3),
  turns=st.integers(1, 3),
  fault=st.sampled_from(FAULTS),
  delays=DELAYS,
  update_s=st.sampled_from([0.0, 0.5, 5.0]),
  transfer_s=st.sampled_from([0.0, 1.0, 20.0]),
  train_s=st.sampled_from([0.0, 3.0]),
  steps=STEPS,
)
def test_no_run_breaks_a_promise_whatever_happens_to_its_engines(
  name,
  rounds,
  num_engines,
  group_size,
  turns,
  fault,
  delays,
  update_s,
  transfer_s,
  train_s,
  steps,
):
  schedule = virtual_run.SCHEDULES[name]
  checker = checker_lib.Checker(schedule, group_size)
  ledger = token_ledger.LedgerBuilder()
  run = virtual_run.Run(
    schedule,
    rounds=rounds,
    num_engines=num_engines,
    group_size=group_size,
    source=fakes.Counting(
      turns=turns,
      fault=fault,
      faulty=lambda index: index % 5 == 0,
      member=lambda member: member % 3 == 0,
    ),
    delay_s=lambda priority: delays[sum(priority) % len(delays)],
    learner=simulated_learner.LearnerSpeed(token_s=0.01, update_s=train_s),
    transfer_s=transfer_s,
    update_s=update_s,
    recovery=QUICK,
    build_again=_starting,
    disturb=_disturbing(steps),
    listeners=(checker.observe, ledger.observe),
  ).start()
  assert checker.finish() == []
  assert ledger.ledger().error == 0
  trained = sorted(event["group"] for event in run.of("trained"))
  assert len(trained) == rounds * schedule.groups_per_round
  assert len(set(trained)) == len(trained)


class _Loop(stateful.RuleBasedStateMachine):
  """Gate and buffer as the loop calls them, restarts included.

  Groups train in the order of submission, so admission alone has to keep the
  bound: no rule looks at it.
  """

  ROUNDS = 5

  @stateful.initialize(groups=st.integers(1, 3), eta=st.integers(0, 3))
  def begin(self, groups, eta):
    self.schedule = overlap.bounded(groups, max(eta, 1), 1)
    if not eta:
      self.schedule = overlap.sync(groups, groups_per_microbatch=1)
    self.eta, self.size = eta, groups
    self.total = self.ROUNDS * groups
    self.gate = staleness_gate.StalenessGate(self.schedule, self.total)
    self.buffer = group_buffer.GroupBuffer()
    self.first, self.trained, self.rounds, self.taken = {}, [], 0, []
    self.save()

  def save(self):
    self.saved = (
      self.rounds,
      list(self.trained),
      dict(self.first),
      self.gate.next_group,
      dict(self.buffer.untrained),
      dict(self.buffer.in_flight),
    )

  @stateful.precondition(lambda self: self.gate.may_admit())
  @stateful.rule()
  def admit(self):
    group = self.gate.admit()
    self.first[group] = self.gate.version
    self.buffer.submit(group, group_buffer.Attempt(_task(group)))

  @stateful.precondition(lambda self: self.buffer.in_flight)
  @stateful.rule(data=st.data())
  def finish(self, data):
    group = data.draw(st.sampled_from(sorted(self.buffer.in_flight)))
    self.buffer.put(_group(group))

  @stateful.precondition(lambda self: self.buffer.in_flight)
  @stateful.rule(data=st.data())
  def play_again(self, data):
    # An attempt that was dropped; the next one begins with newer weights.
    group = data.draw(st.sampled_from(sorted(self.buffer.in_flight)))
    before = self.buffer.in_flight[group]
    self.buffer.withdraw(group)
    self.first[group] = self.gate.version
    after = dataclasses.replace(before, number=before.number + 1)
    self.buffer.submit(group, after)

  @stateful.precondition(lambda self: self.buffer.has(1))
  @stateful.rule()
  def take(self):
    if self.rounds != self.gate.version and not self.eta:
      return  # A round with a bound of 0 ends with its publish.
    (group,) = self.buffer.take(1)
    self.taken.append(group.group_id)
    self.gate.check(self.first[group.group_id], self.rounds, group.group_id)
    if len(self.taken) == self.size:
      self.buffer.commit()
      self.trained += self.taken
      self.taken, self.rounds = [], self.rounds + 1

  @stateful.precondition(lambda self: self.gate.version < self.rounds)
  @stateful.rule()
  def publish(self):
    self.gate.release(self.gate.version + 1)

  @stateful.precondition(lambda self: not self.taken)
  @stateful.rule()
  def checkpoint(self):
    self.save()

  @stateful.rule()
  def kill(self):
    self.rounds, trained, first, next_group, ready, flying = self.saved
    self.trained, self.first, self.taken = list(trained), dict(first), []
    self.gate = staleness_gate.StalenessGate(
      self.schedule, self.total, next_group, self.rounds, next_group
    )
    self.buffer = group_buffer.GroupBuffer(self.rounds * self.size)
    for group in ready.values():
      self.buffer.restore(group)
    for group, attempt in flying.items():
      self.buffer.submit(group, attempt)

  @stateful.invariant()
  def every_group_is_in_one_place(self):
    if not hasattr(self, "gate"):
      return
    places = [*self.trained, *self.buffer.untrained, *self.buffer.in_flight]
    assert sorted(places) == list(range(self.gate.next_group))
    assert self.trained == sorted(self.trained)

  def teardown(self):
    """Whatever has happened, the run can go on to its end."""
    while len(self.trained) < self.total:
      while self.gate.may_admit():
        self.admit()
      for group in self.buffer.in_flight:
        self.buffer.put(_group(group))
      before = len(self.trained) + len(self.taken)
      if self.buffer.has(1):
        self.take()
      if self.gate.version < self.rounds:
        self.publish()
      elif len(self.trained) + len(self.taken) == before:
        raise AssertionError(f"stuck after {self.trained}")
    self.every_group_is_in_one_place()


def _task(index):
  return base.Task(f"game/train/{index}", index, "train", seed=index)


def _group(number):
  return trajectory.Group(group_id=number, trajectories=[], admitted=0)


@pytest.mark.hypothesis
def test_gate_and_buffer_lose_no_group_and_keep_the_bound_over_restarts():
  searches.run(_Loop, count=80, steps=40)
