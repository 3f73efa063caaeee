"""Tests of environments and engines that do not do as they are told."""

import asyncio
import dataclasses

import pytest

from envs import base
from models.chat import word_chat
from rl.data import trajectory
from rl.pools import router
from rl.runtime import virtual_clock
from rl.schedule import overlap
from rl.testing import fake_engine, fakes
from tests.helpers import players_under_test as players
from tests.helpers import virtual_run

STATUS = trajectory.Status
ON = base.Step([base.Message("user", "on")], 0.0, False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stubborn(players.Kept):
  """Environments whose step catches its cancellation, and takes 30 s."""

  def __call__(self, task):
    environment = super().__call__(task)

    async def step(answer):
      loop = asyncio.get_running_loop()
      environment.steps += 1
      end_s = loop.time() + 30
      while (left_s := end_s - loop.time()) > 0:
        try:
          await asyncio.sleep(left_s)
        except asyncio.CancelledError:
          continue
      return ON

    vars(environment)["step"] = step
    return environment


@pytest.mark.parametrize(
  ("abort_s", "status"), [(None, STATUS.ENV_FAULT), (0.1, STATUS.STALE)]
)
def test_a_step_that_catches_its_cancellation_is_left_behind(abort_s, status):
  async def run():
    loop, source = asyncio.get_running_loop(), Stubborn(turns=3)
    playing = players.player(source, limits=players.ONE)
    play = players.begin(playing)
    if abort_s is not None:
      loop.call_later(abort_s, play.abort, "stale")
    group, end_s = await play.run(), loop.time()
    (environment,) = source.kept
    await players.closed(playing)
    seen = [(loop.time() - end_s, len(playing.late), environment.closed)]
    await asyncio.wait(playing.late)
    seen.append((loop.time(), len(playing.late), environment.closed))
    assert environment.steps == 1
    return group.trajectories[0], end_s, seen

  member, end_s, seen = virtual_clock.run(run())
  # A step may take 0.2 s, and so may what comes behind it.
  assert (member.status, end_s) == (status, abort_s or 0.2)
  assert member.num_sampled == 2
  # It is closed when the step has ended, and counted until then.
  assert seen == [(pytest.approx(0.2), 1, False), (30.0, 0, True)]


def faults(run):
  members = [t for group in run.groups for t in group.trajectories]
  return [t.fault for t in members if not t.status.trainable]


def count(run, wanted):
  """Returns how many of the tasks that were trained are wanted; some are."""
  found = sum(wanted(group.task.index) for group in run.groups)
  assert found
  return found


def test_a_run_ends_although_its_environments_never_do():
  @dataclasses.dataclass(frozen=True, kw_only=True)
  class Endless(fakes.Counting):
    def __call__(self, task):
      environment = super().__call__(task)

      async def step(answer):
        while True:
          try:
            await asyncio.sleep(3600)
          except asyncio.CancelledError:
            continue

      if task.index % 3 == 0:
        vars(environment)["step"] = step
      return environment

  run = virtual_run.Run(overlap.sync(4), rounds=2, source=Endless(), step_s=5.0)
  run.start()
  assert not run.violations()
  assert run.ledger.error == 0
  assert faults(run) == ["step took over 5 s"] * 2 * count(
    run, lambda index: index % 3 == 0
  )


def test_an_environment_that_leaves_the_process_is_data():
  @dataclasses.dataclass(frozen=True, kw_only=True)
  class Leaving(fakes.Counting):
    def __call__(self, task):
      environment = super().__call__(task)

      async def step(answer):
        raise SystemExit("quit()")

      if task.index % 3 == 0:
        vars(environment)["step"] = step
      return environment

  run = virtual_run.Run(overlap.sync(4), rounds=2, source=Leaving()).start()
  assert faults(run) == ["step raised SystemExit: quit()"] * 2 * count(
    run, lambda index: index % 3 == 0
  )


def test_what_is_aborted_between_two_answers_asks_for_no_other():
  async def run():
    served = players.fake()
    playing = players.player(
      fakes.Counting(turns=3), served, limits=players.ONE
    )
    play = players.begin(playing)
    # It is told of the turn, and aborts, before the member goes on.
    playing.log.listeners.append(
      lambda event: event["kind"] == "turn" and play.abort("stale")
    )
    group = await play.run()
    return group, served.stats().sampled_tokens

  group, sampled = virtual_clock.run(run())
  assert group.num_sampled == sampled == 2
  assert group.trajectories[0].status is STATUS.STALE


def test_an_engine_that_cancels_by_itself_loses_no_group():
  class Cancelling(fake_engine.FakeEngine):
    """Cancels its answers to member 1."""

    async def generate(self, request):
      if request.priority[1] == 1:
        nobody = asyncio.get_running_loop().create_future()
        nobody.cancel()
        await nobody
      return await super().generate(request)

  async def run():
    served = Cancelling((players.YES,), word_chat.END)
    playing = players.player(fakes.Counting(), served)
    group = await players.begin(playing).run()
    return group, players.of_kind(playing, "fault")

  group, (fault,) = virtual_clock.run(run())
  statuses = [t.status for t in group.trajectories]
  assert (
    statuses == [STATUS.COMPLETED, STATUS.ENGINE_FAULT] + [STATUS.COMPLETED] * 2
  )
  assert (fault["index"], fault["what"]) == (1, group.trajectories[1].fault)
  assert "the engine cancelled" in fault["what"]


def test_an_abort_reaches_a_request_whose_engine_was_lost():
  async def run():
    engines = [players.fake(delay_s=lambda _: 10.0) for _ in range(2)]
    playing = players.player(fakes.Counting(), limits=players.ONE)
    pool = router.Router(engines)
    playing = dataclasses.replace(playing, router=pool)
    play = players.begin(playing)
    running = asyncio.create_task(play.run())
    await asyncio.sleep(4)
    await engines[0].close()
    await asyncio.sleep(4)
    play.abort("stale")
    group = await running
    return group, asyncio.get_running_loop().time()

  group, end_s = virtual_clock.run(run())
  # The other engine has begun it anew, at 4 s, and sampled a first token.
  assert (end_s, group.num_sampled) == (8.0, 1)
  assert group.trajectories[0].status is STATUS.STALE


def test_an_abort_reaches_a_request_whose_engine_dies_at_the_same_moment():
  async def run():
    loop = asyncio.get_running_loop()
    engines = [players.fake(delay_s=lambda _: 10.0) for _ in range(2)]
    pool = router.Router(engines)
    playing = players.player(fakes.Counting(), limits=players.ONE)
    playing = dataclasses.replace(playing, router=pool)
    play = players.begin(playing)
    running = asyncio.create_task(play.run())
    await asyncio.sleep(4)
    await engines[0].close()
    play.abort("stale")
    group = await running
    return group, loop.time(), engines[1].stats().sampled_tokens

  group, end_s, sampled_anew = virtual_clock.run(run())
  assert (end_s, sampled_anew) == (4.0, 0)
  assert group.trajectories[0].status is STATUS.STALE


@pytest.mark.parametrize("lost_s", [6.5, 14.5, 31.5])
def test_a_trajectory_has_one_version_when_an_engine_is_lost_that_drains(
  lost_s,
):
  async def disturb(run):
    await asyncio.sleep(lost_s)
    await run.engines[0].close()

  def delay_s(priority):
    return 6.0 if priority[0] % 2 == 0 and priority[1] == 0 else 1.0

  run = virtual_run.Run(
    overlap.bounded(4, 2, 1),
    rounds=6,
    num_engines=2,
    source=fakes.Counting(turns=4),
    delay_s=delay_s,
    disturb=disturb,
  ).start()
  assert not run.violations()
  assert run.ledger.error == 0
  members = [t for group in run.groups for t in group.trajectories]
  assert all(len(t.versions) <= 1 for t in members)
  lost = [t for t in members if t.status is STATUS.ENGINE_FAULT]
  assert all("which no engine that is left serves" in t.fault for t in lost)
  # At 31.5 s the other engine has newer weights already.
  assert bool(lost) == (lost_s == 31.5)
