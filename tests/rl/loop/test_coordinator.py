"""Tests of the coordinator: every schedule, in virtual time."""

import asyncio
import contextlib
import itertools
import json
import random

import pytest

from models.chat import word_chat
from rl.audit import checker, event_log, token_ledger
from rl.data import trajectory
from rl.loop import coordinator
from rl.loop import progress as progress_lib
from rl.runtime import logical_clock, watchdog
from rl.schedule import overlap
from rl.simulation import learner as simulated_learner
from rl.testing import fakes, scripted_engine
from tests.helpers import players_under_test as players
from tests.helpers import virtual_run


def later(event, by_s=1e3):
  """Returns the event as one log of all runs would have it."""
  times = ("t", "start", "end")
  return {k: v + by_s if k in times else v for k, v in event.items()}


def uneven(priority):
  """Some members take ten times as long as others."""
  return 0.02 if sum(priority) % 5 == 0 else 0.002


def at_once(priority):
  return 0.0


def slow_learner(update_s):
  return simulated_learner.LearnerSpeed(token_s=0.0, update_s=update_s)


def stopped_after_two_rounds(build):
  """Returns a run that was asked to stop when its second round ended."""

  class Stopping(virtual_run.Observer):
    async def on_round(self, trained):
      await super().on_round(trained)
      if trained.metrics["round"] == 2:
        run.loop.stop()

  run = build(observer=Stopping())
  with pytest.raises(coordinator.Stopped):
    run.start()
  return run


@pytest.mark.parametrize("name", virtual_run.SCHEDULES)
def test_every_schedule_trains_16_groups_once_each(name):
  schedule = virtual_run.SCHEDULES[name]
  run = virtual_run.Run(
    schedule, delay_s=uneven, programs=virtual_run.Placing()
  ).start()
  trained = [group.group_id for group in run.groups]
  assert len(set(trained)) == len(trained) == 16
  if schedule.consume == "submit":
    assert trained == list(range(16))
  assert run.state.updates == 4 * schedule.updates_per_round
  assert run.observer.published == [1, 2, 3, 4]
  assert run.violations() == []
  assert run.ledger.error == 0


def word_by_word(request):
  """Answers a word by seed and position, and goes on with one that has it."""
  if request.tokens[-1] in (players.YES, players.NO):
    return (word_chat.END,)
  word = (request.seed + len(request.tokens)) % 2
  return (players.YES, players.NO)[word], word_chat.END


def by_member(request, i):
  """Seconds of an id that sums of floats keep exact."""
  return (1 + request.seed % 61) / 256


class Saving(virtual_run.Observer):
  """Keeps what a checkpoint of each round holds."""

  def __init__(self, saved):
    super().__init__()
    self.saved = saved

  async def on_boundary(self, progress):
    self.saved[progress.trained] = json.dumps(progress.to_host())


def play_slowly(name, host=None, **fields):
  """Plays six rounds, or what a checkpoint leaves, on a logical clock."""

  def build():
    engine = scripted_engine.ScriptedEngine(word_by_word, by_member)
    engine.version = 0 if host is None else progress.trained
    return engine

  run = virtual_run.Run(
    virtual_run.SCHEDULES[name],
    rounds=6,
    learner=slow_learner(1 / 8),
    observer=Saving(saved := {}),
    build=build,
    settle_every=1,
    num_engines=2,
    **fields,
  )
  if host is None:
    return on_logical_clock(run), saved
  progress = progress_lib.from_host(2, json.loads(host))
  return on_logical_clock(run, progress), saved


def on_logical_clock(run, *args):
  with asyncio.Runner(loop_factory=logical_clock.LogicalEventLoop) as runner:
    runner.run(run.play(*args))
  return run


def members(run):
  return [one for group in run.groups for one in group.trajectories]


def as_trained(run):
  return [json.dumps(trajectory.group_to_json(group)) for group in run.groups]


@pytest.mark.parametrize(
  "name", ["in flight, 3", "drop", "bounded", "as completed"]
)
def test_a_run_that_settles_is_continued_as_if_nothing_had_happened(name):
  whole, kept = play_slowly(name)
  assert whole.violations() == []
  assert whole.ledger.error == 0
  answers_kept = 0
  for trained in (2, 3, 4):
    rest, kept_again = play_slowly(name, kept[trained])
    assert kept_again[6] == kept[6]
    assert as_trained(rest) == as_trained(whole)[4 * trained :]
    assert not rest.of("begun_anew")
    cut = [e["first_version"] for e in rest.of("continued", turns=0)]
    answers_kept += sum(version is not None for version in cut)
    # The two logs are one: nothing is lost, and nothing counted twice.
    first = [e for e in whole.log.events if e["t"] < (trained + 1) * 2**14]
    log = [*first, *({**e, "t": e["t"] + 2**20} for e in rest.log.events)]
    log = list(event_log.surviving(log))
    schedule = virtual_run.SCHEDULES[name]
    assert checker.violations(log, schedule, 2) == []
    assert token_ledger.of(log).sampled == whole.ledger.sampled
  # Of some the first answer was cut in the middle; none under way is left when
  # a round of a bound of 0 is over, and engines of "bounded" have drained.
  assert (answers_kept > 0) == (name in ("in flight, 3", "drop"))


def test_a_run_that_settles_takes_all_sources_for_up():
  def fails(index):
    return random.Random(f"0/{index}").random() < 0.5

  source = fakes.Counting(restarts=True, fault="start", faulty=fails)
  fields = {"source": source, "group_size": 4, "step_s": 5.0}
  whole, kept = play_slowly("as completed", **fields)
  assert any("not started" in one.fault for one in members(whole))
  for trained in (1, 3, 5):
    rest, _ = play_slowly("as completed", kept[trained], **fields)
    assert as_trained(rest) == as_trained(whole)[4 * trained :]


@pytest.mark.parametrize("eta", [1, 2, 3])
def test_staleness_reaches_the_bound_and_never_passes_it(eta):
  schedule = overlap.in_flight(4, eta, 1)
  # The learner is far slower than rollout, so the window is always full.
  run = virtual_run.Run(
    schedule, rounds=8, delay_s=at_once, learner=slow_learner(0.03)
  ).start()
  lags = event_log.staleness(run.log.events)
  assert max(lags) == eta
  assert min(lags) >= 0


@pytest.mark.parametrize("consume", ["submit", "ready"])
@pytest.mark.parametrize("tokens", [1, 40, 80, 1000])
def test_a_micro_batch_is_the_longest_prefix_that_is_ready_and_fits(
  consume, tokens
):
  draw = random.Random(tokens)
  schedule = overlap.Overlap(
    groups_per_round=12,
    updates_per_round=2,
    consume=consume,
    groups_per_microbatch=None,
    tokens_per_microbatch=tokens,
  )
  run = virtual_run.Run(
    schedule,
    # Members with a fault are not trained, so that groups differ in size.
    source=fakes.Counting(fault="step", member=lambda i: draw.random() < 0.3),
    group_size=4,
    delay_s=lambda priority: draw.random(),
    learner=simulated_learner.LearnerSpeed(token_s=0.01, update_s=0.0),
  ).start()
  assert run.violations() == []
  taken = run.of("dequeued")
  sizes = {event["group"]: event["length"] for event in taken}
  assert len(set(sizes.values())) > 1
  log, ready, num_taken = iter(run.log.events), [], 0
  for _, same in itertools.groupby(
    taken, key=lambda event: (event["version"], event["microbatch"])
  ):
    groups = [event["group"] for event in same]
    # Up to where the learner took the first of them, and then all of them.
    before = itertools.takewhile(lambda e: e["kind"] != "dequeued", log)
    ready += [e["group"] for e in before if e["kind"] == "ready"]
    following = itertools.count(num_taken) if consume == "submit" else ready
    needed = schedule.groups_per_update
    needed -= num_taken % needed
    prefix = [
      *itertools.takewhile(
        ready.__contains__, itertools.islice(following, needed)
      )
    ]
    fits = [
      n
      for n in range(1, len(prefix) + 1)
      if n == 1 or sum(map(sizes.__getitem__, prefix[:n])) <= tokens
    ]
    assert groups == prefix[: fits[-1]]
    ready = [group for group in ready if group not in groups]
    num_taken += len(groups)
    list(itertools.islice(log, len(groups) - 1))  # The others of them.
  assert num_taken == 48


def test_weights_go_out_as_soon_as_a_round_is_trained():
  run = virtual_run.Run(
    overlap.in_flight(4, 1, 4), delay_s=at_once, learner=slow_learner(0.01)
  ).start()
  ends = {e["version"] + 1: e["end"] for e in run.of("update")}
  assert ends == {e["version"]: e["t"] for e in run.of("publish_start")}
  assert run.observer.published == [1, 2, 3, 4]


def test_a_round_trains_while_the_weights_of_the_last_one_travel():
  run = virtual_run.Run(
    overlap.in_flight(4, 1, 4),
    delay_s=at_once,
    learner=slow_learner(0.01),
    transfer_s=0.008,
  ).start()
  # Rounds follow one another, at 10 ms each, and serve 8 ms later.
  ends = [round(e["end"], 6) for e in run.of("update")]
  assert ends == [0.01, 0.02, 0.03, 0.04]
  served = [round(e["t"], 6) for e in run.of("published")]
  assert served == [0.018, 0.028, 0.038, 0.048]
  for event in run.of("submitted"):  # The gate has waited for that.
    assert event["version"] == max(0, event["group"] // 4 - 1)
  assert run.violations() == []


def test_the_gate_opens_only_after_the_weights_are_served():
  run = virtual_run.Run(overlap.sync(4, 1, 2)).start()
  for event in event_log.of_kind(run.log.events, "submitted"):
    assert event["version"] == event["group"] // 4
  order = run.kinds("submitted", "published")
  for i in range(1, 4):
    assert order.index(("submitted", i)) > order.index(("published", i))


def test_members_of_a_group_share_their_prompt_when_they_are_asked_to():
  packed = []
  for share in (False, True):
    programs = virtual_run.Placing()
    virtual_run.Run(
      overlap.sync(4, 1, 4),
      rounds=1,
      programs=programs,
      packing={"share_prompts": share},
    ).start()
    packed.append(programs.batches[0])
  own, shared = packed
  assert own.prefix is None
  assert shared.prefix is not None
  assert own.sampled.sum() == shared.sampled.sum()
  # Four groups of two begin with "go" and <agent>: each saves these 2 ids once.
  assert (own.segments > 0).sum() - (shared.segments > 0).sum() == 4 * 2


@pytest.mark.parametrize("name", virtual_run.SCHEDULES)
def test_a_stopped_run_goes_on_without_losing_or_repeating_a_group(name):
  schedule = virtual_run.SCHEDULES[name]

  def run(**settings):
    return virtual_run.Run(
      schedule, delay_s=uneven, programs=virtual_run.Placing(), **settings
    )

  first = stopped_after_two_rounds(run)
  saved = first.observer.last
  assert saved
  assert saved.trained in (2, 3)
  again = run().start(saved)
  assert again.state.updates == 4 * schedule.updates_per_round
  trained = [group.group_id for group in (*first.groups, *again.groups)]
  assert len(set(trained)) == len(trained) == 16
  log = [*first.log.events, *map(later, again.log.events)]
  assert checker.violations(event_log.surviving(log), schedule, 2) == []


@pytest.mark.parametrize("name", ["sync", "in flight, 3", "bounded"])
def test_a_run_goes_on_with_fewer_engines_and_then_with_more(name):
  schedule = virtual_run.SCHEDULES[name]
  log, saved = [], None

  class Stopping(virtual_run.Observer):
    async def on_round(self, trained):
      await super().on_round(trained)
      if trained.metrics["round"] in (2, 4):
        run.loop.stop()

  for number, engines in enumerate((2, 1, 3)):
    run = virtual_run.Run(
      schedule, 6, delay_s=uneven, num_engines=engines, observer=Stopping()
    )
    with contextlib.suppress(coordinator.Stopped):
      run.start(saved)
    saved = run.observer.last
    log += [later(event, 1e3 * number) for event in run.log.events]
  assert saved
  assert saved.trained == 6
  assert {event.get("engine") for event in log} >= {0, 1, 2}
  assert checker.violations(event_log.surviving(log), schedule, 2) == []


def test_a_resumed_run_plays_the_same_tasks_as_one_that_never_stopped():
  def tasks(run):
    return {
      e["group"]: e["tokens"] for e in run.log.events if e["kind"] == "trained"
    }

  def run(**settings):
    return virtual_run.Run(overlap.sync(4, 1, 2), **settings)

  whole = run().start()
  cut = stopped_after_two_rounds(run)
  rest = run().start(cut.observer.last)
  assert {**tasks(cut), **tasks(rest)} == tasks(whole)
  assert rest.tasks.cursor == whole.tasks.cursor


def test_the_log_says_which_members_a_limit_has_cut():
  # No episode of theirs ever ends.
  run = virtual_run.Run(
    overlap.sync(4),
    source=fakes.Counting(turns=99),
    rounds=1,
    programs=virtual_run.Placing(),
    packing={"mask_truncated": True},
  ).start()
  told = [(e["used"], e["cut"]) for e in run.of("trained")]
  assert told == [([], [0, 1])] * 4
  assert dict(run.ledger.causes) == {"truncated": run.ledger.sampled}
  assert run.violations() == []


def test_the_log_says_which_members_of_a_group_were_trained():
  # Odd members fail in their first step; the others play 3 turns of 4 ids.
  source = fakes.Counting(turns=3, fault="step", member=lambda m: m % 2 == 1)
  run = virtual_run.Run(
    overlap.in_flight(4, 1, 1), source=source, group_size=4
  ).start()
  assert all(e["members"] == [0, 1, 2, 3] for e in run.of("trained"))
  assert all(e["used"] == [0, 2] for e in run.of("trained"))
  found = token_ledger.build(run.log.events).selection_bias()
  assert (found.trained.episodes, found.trained.mean_length) == (32, 12.0)
  # (3 + 1) / 2 turns of 4 ids: half of the launched ones have one turn.
  assert found.launched.mean_length == 8.0
  assert run.violations() == []


def test_a_dead_wait_is_named():
  def forever(priority):
    return 60.0 if priority[0] == 1 else 0.0

  run = virtual_run.Run(
    overlap.sync(4, 1, 2), delay_s=forever, progress_timeout_s=0.3
  )
  with pytest.raises(watchdog.Stalled, match=r"learner.*1 groups.*them 1"):
    run.start()


async def _never(version):
  """An evaluation whose requests nobody answers."""
  await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("name", ["sync", "in flight, 1", "bounded"])
def test_an_evaluation_that_never_ends_ends_the_run_instead(name):
  # With a bound above 0 the next round trains meanwhile.
  run = virtual_run.Run(
    virtual_run.SCHEDULES[name],
    observer=virtual_run.Observer(_never),
    progress_timeout_s=100.0,
  )
  found = "learner waited .* for the evaluation of version 1 "
  with pytest.raises(watchdog.Stalled, match=found) as stalled:
    run.start()
  waits_too = "the version before to be served" in str(stalled.value)
  assert waits_too == (name != "sync")
  # What it leaves open breaks nothing.
  assert len(run.of("trained")) >= 4
  assert (run.violations(), run.ledger.error) == ([], 0)


def test_engines_that_never_take_weights_end_the_run():
  run = virtual_run.Run(
    virtual_run.SCHEDULES["bounded"], update_s=1e6, progress_timeout_s=100.0
  )
  with pytest.raises(watchdog.Stalled, match="engines to take version 1"):
    run.start()
  assert (run.violations(), run.ledger.error) == ([], 0)


def test_an_engine_that_dies_ends_the_run_with_its_reason():
  def die(priority):
    raise RuntimeError("device lost")

  run = virtual_run.Run(overlap.sync(4, 1, 2), delay_s=die)
  with pytest.raises(RuntimeError, match="device lost"):
    run.start()


def test_the_log_probability_gap_is_reported_every_round():
  run = virtual_run.Run(
    overlap.in_flight(4, 1, 2), programs=virtual_run.Placing()
  ).start()
  # The fake learner scores what the engine reported: a gap of exactly 0.
  assert [m["logprob_gap_max"] for m in run.observer.metrics] == [0.0] * 4


# Publishing that is held back.


class Holding(virtual_run.Observer):
  """Holds publishing back after some rounds."""

  def __init__(self, rounds):
    super().__init__()
    self.held_after = rounds

  def held(self):
    trained = self.metrics[-1]["round"]
    return "a metric left its bound" if trained in self.held_after else ""


@pytest.mark.parametrize("eta", [1, 2])
def test_weights_that_are_held_back_are_published_once_it_goes_on(eta):
  # Held after round 2, whose weights are on their way, and rounds 3 to 2 + eta
  # train what was admitted by then; after the last of them it goes on.
  held_after = range(2, 2 + eta)
  run = virtual_run.Run(
    overlap.in_flight(4, eta, 1), rounds=8, observer=Holding(held_after)
  ).start()
  kinds = run.kinds(
    "update", "publishing_held", "publishing_resumed", "publish_start"
  )
  first = kinds.index(("publishing_held", 1))
  last = kinds.index(("publishing_resumed", 1 + eta))
  # The publish of round 2 may begin before or after.
  between = [x for x in kinds[first + 1 : last] if x != ("publish_start", 2)]
  assert between == [("update", 2 + i) for i in range(eta)]
  assert len(run.observer.rounds) == 8
  assert run.observer.published == [*range(1, 9)]
  # Engines serve version 2 meanwhile.
  assert {e["version"] for e in run.of("submitted")} >= {2, 2 + eta}
  assert max(event_log.staleness(run.log.events)) == eta
  assert run.violations() == []
  assert run.ledger.error == 0


def test_a_run_that_ends_while_publishing_is_held_back_serves_the_last():
  run = virtual_run.Run(
    overlap.in_flight(4, 1, 1), rounds=4, observer=Holding([3, 4])
  ).start()
  assert run.observer.published == [1, 2, 3, 4]
  assert run.violations() == []


def test_a_restart_publishes_what_was_held_back():
  class Stopping(Holding):
    async def on_round(self, trained):
      await super().on_round(trained)
      if trained.metrics["round"] == 4:
        run.loop.stop()

  schedule = overlap.in_flight(4, 2, 1)
  run = virtual_run.Run(schedule, rounds=6, observer=Stopping([2, 3, 4]))
  with pytest.raises(coordinator.Stopped):
    run.start()
  saved = run.observer.last
  assert saved
  assert (saved.trained, run.observer.published) == (4, [1, 2])
  rest = virtual_run.Run(schedule, rounds=6).start(saved)
  assert rest.observer.published == [5, 6]
  log = [*run.log.events, *map(later, rest.log.events)]
  assert checker.violations(event_log.surviving(log), schedule, 2) == []
