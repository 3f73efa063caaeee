"""Building an experiment: the parts, the warm start, one whole small run."""

import asyncio
import dataclasses
import itertools
import math
import types

import jax
import numpy as np
import pytest

from envs import base
from envs.rewards import rewards
from models import config as model_config
from rl import assemble, initial_state
from rl import experiment as experiment_lib
from rl.algorithms import kl, presets, references
from rl.audit import checker, event_log, token_ledger
from rl.data import trajectory
from rl.engine.builtin import engine as engine_lib
from rl.engine.builtin import settings as engine_settings
from rl.loop import warm_start
from rl.pools import placement, weight_transfer
from rl.rollout import evaluate, group_rollout
from rl.runtime import checksum, logical_clock
from rl.schedule import overlap
from rl.testing import fakes
from rl.train import optimizers
from tests.helpers import counting_runs
from tests.helpers import players_under_test as players

pytestmark = pytest.mark.compiled


def experiment(**changes):
  plain = experiment_lib.Experiment(
    environment=fakes.Counting(turns=2),
    reward=rewards.Outcome(),
    model=model_config.tiny_moe(
      vocab_size=7, num_layers=1, d_model=32, max_length=16
    ),
    rollout=group_rollout.Rollout(group_size=4, max_tokens=16),
    engine=engine_settings.EngineSettings(
      slots=32, row_buckets=(32,), chunk_buckets=(4,)
    ),
    overlap=overlap.in_flight(4, 1, 2),
    batch=experiment_lib.BatchShape(rows=8, length=16),
    rounds=3,
  )
  return dataclasses.replace(plain, **changes)


async def run(settings):
  watching = counting_runs.Watching()
  async with counting_runs.built(settings) as parts:
    start = await counting_runs.begun(parts)
    await assemble.coordinate(parts, watching).run(start)
    outcome, _ = await evaluate.evaluate(
      parts.player, episodes=16, temperature=0.0, success=1.0, seed=0
    )
  return watching.rounds, outcome, parts.log.events


@pytest.mark.parametrize(
  "where",
  [
    # Nearly every other run of the tests has one device a mesh.
    pytest.param(placement.Placement(), marks=pytest.mark.slow),
    placement.Placement(colocated=True),
    pytest.param(
      placement.Placement(
        learner=placement.MeshSpec(data=2, expert=2),
        decode=placement.MeshSpec(data=2, expert=1),
      ),
      marks=pytest.mark.slow,
    ),
  ],
  ids=["one and one", "colocated", "four and two"],
)
async def test_a_whole_run_keeps_its_promises_on_any_placement(where):
  settings = experiment(placement=where)
  rounds, _, log = await run(settings)
  assert [m["round"] for m in rounds] == [1, 2, 3]
  assert checker.violations(event_log.surviving(log), settings.overlap, 4) == []
  for metrics in rounds:
    # Float32 on two meshes: the order of sums differs, nothing else.
    assert metrics["logprob_gap_max"] < 1e-4
    assert metrics["logprob_gap_tokens"] > 0
    assert math.isfinite(metrics["loss"])


@pytest.mark.slow
def test_a_run_whose_engine_breaks_goes_on_with_another_and_repeats():
  settings = experiment(
    rounds=2,
    repeatable=True,
    publishing=weight_transfer.Publishing(verify=True),
  )

  async def play():
    parts = assemble.build(settings, clock=asyncio.get_running_loop().time)
    try:
      start = await counting_runs.begun(parts)
      (first,) = parts.engines
      break_at(first, dispatch=4)
      watching = counting_runs.Watching()
      trained = await assemble.coordinate(parts, watching).run(start)
      (second,) = parts.router.engines
      assert isinstance(second, engine_lib.BuiltinEngine)
      assert second is not first
      assert await second.checksum() == (2, checksum.of(trained.params))
      # The memory of the first is free: all pages are those of the second.
      pages = jax.tree.leaves(second._runner._cache)
      shapes = {page.shape for page in pages}
      live = [x for x in jax.live_arrays() if x.shape in shapes]
      assert len(live) == len(pages)
      return jax.device_get(trained.params), parts.log.events
    finally:
      await parts.close()

  def run_once():
    loop = logical_clock.LogicalEventLoop
    with asyncio.Runner(loop_factory=loop) as runner:
      return runner.run(play())

  params, log = run_once()
  assert checker.violations(log, settings.overlap, 4) == []
  (lost,) = event_log.of_kind(log, "engine_lost")
  assert "decoding raised FloatingPointError('broken')" in lost["reason"]
  assert len(list(event_log.of_kind(log, "engine_back"))) == 1
  assert token_ledger.of(log).error == 0
  again, same = run_once()
  assert same == log
  jax.tree.map(np.testing.assert_array_equal, params, again)


def break_at(engine, dispatch):
  """Makes a dispatch of an engine fail, the first being 1."""
  advance, calls = engine._runner.advance, itertools.count(1)

  def broken(*args, **kwargs):
    if next(calls) == dispatch:
      raise FloatingPointError("broken")
    return advance(*args, **kwargs)

  engine._runner.advance = broken


@pytest.mark.slow
async def test_a_warm_start_teaches_the_oracles_answer():
  # The oracle always says "yes"; random parameters say it one time in seven.
  settings = experiment(
    rounds=1,
    warm_start=warm_start.WarmStart(steps=20, episodes=16, exploration=0.0),
  )
  _, outcome, _ = await run(settings)
  assert outcome.success == 1.0
  assert outcome.episodes == 16


async def started(settings, report=lambda text: None):
  """Returns random weights, and the state that the run begins with."""
  async with counting_runs.built(settings) as parts:
    first = initial_state.fresh_state(parts.programs, settings.seed)
    state = await initial_state.create(parts, report)
    return jax.device_get((first.params, state))


async def test_the_reference_is_the_policy_after_its_warm_start():
  random, state = await started(
    experiment(
      algorithm=presets.Grpo(kl=kl.KlPenalty(), reference=references.Initial()),
      warm_start=warm_start.WarmStart(steps=2, episodes=4),
    )
  )
  jax.tree.map(np.testing.assert_array_equal, state.reference, state.params)
  moved = jax.tree.map(lambda a, b: (a != b).any(), state.reference, random)
  assert all(jax.tree.leaves(moved))


@pytest.mark.parametrize("max_skipped", [0, 2])
async def test_a_warm_start_that_blows_up_the_weights_ends_and_says_why(
  max_skipped,
):
  said = []
  settings = experiment(
    warm_start=warm_start.WarmStart(
      steps=9, episodes=4, optimizer=optimizers.AdamW(learning_rate=1e30)
    ),
    max_skipped=max_skipped,
  )
  # After the first step nothing is finite any more.
  number = max_skipped + 1
  message = f"warm_start: .* finite: {number}; the last, step {number + 1}, .*"
  with pytest.raises(FloatingPointError, match=message) as error:
    await started(settings, said.append)
  assert "lower warm_start.optimizer.learning_rate" in str(error.value)
  assert said[-1] == f"warm start {number + 1}/9"


@dataclasses.dataclass(frozen=True)
class Alike:
  """All do equally well."""

  stateless: bool = True

  async def __call__(self, task, transcripts):
    return [base.Grade(0.5, {}) for _ in transcripts]


@pytest.mark.parametrize(
  ("model", "is_trained"),
  [
    (experiment().model, True),
    (
      model_config.tiny(
        vocab_size=7, num_layers=1, d_model=32, d_ff=32, max_length=16
      ),
      False,
    ),
  ],
  ids=["experts", "dense"],
)
async def test_equal_rewards_train_the_routers_of_a_model_with_experts_alone(
  model, is_trained
):
  rounds, _, log = await run(experiment(model=model, reward=Alike(), rounds=1))
  ledger = token_ledger.of(log)
  assert ledger.error == 0
  assert rounds[0]["zero_variance_groups"] == 4
  assert (ledger.trained > 0, ledger.masked > 0) == (is_trained, not is_trained)
  assert (rounds[0]["grad_norm"] > 0) == is_trained


def test_demonstrations_mix_in_as_many_random_answers_as_asked():
  source = fakes.Counting(turns=2)
  chat = experiment().build_chat()

  async def demonstrations(exploration):
    return [
      await warm_start.demonstrate(
        source,
        chat,
        group_rollout.Rollout(),
        source.task(i, "train"),
        exploration,
        0,
      )
      for i in range(200)
    ]

  def said_yes(episodes):
    answers = [turn.tokens[0] for e in episodes for turn in e.turns]
    return np.mean(
      [answer == chat.encode_answer("yes")[0] for answer in answers]
    )

  assert said_yes(asyncio.run(demonstrations(0.0))) == 1.0
  # Random answers are half "yes": 1 - 0.6 / 2 = 0.7, give or take 3 standard
  # errors of sqrt(.7 * .3 / 400) = 0.023.
  assert said_yes(asyncio.run(demonstrations(0.6))) == pytest.approx(
    0.7, abs=0.07
  )


def test_building_touches_no_more_devices_than_the_placement_names():
  parts = assemble.build(experiment())
  assert parts.learner_layout.devices == [jax.devices()[0]]
  assert parts.decode_layouts[0].devices == [jax.devices()[1]]
  asyncio.run(parts.close())


@pytest.mark.virtual_time
async def test_an_evaluation_ends_when_its_environments_are_closed():
  playing = players.player(fakes.Counting(fault="hang_close"))
  outcome, _ = await evaluate.evaluate(
    playing, episodes=3, temperature=0.0, success=1.0, seed=0
  )
  # Each has its deadline of 0.2 s to close; they close side by side.
  assert (outcome.success, asyncio.get_running_loop().time()) == (1.0, 0.2)


def test_evaluation_leaves_faults_out_of_its_share():
  def played(reward):
    status = (
      trajectory.Status.ENV_FAULT
      if reward is None
      else trajectory.Status.COMPLETED
    )
    return trajectory.Trajectory(
      task_id="t", group_id=0, index=0, turns=[], status=status, reward=reward
    )

  outcome = evaluate.summarise([played(r) for r in (1.0, 0.0, 1.0, None)], 1.0)
  assert (outcome.episodes, outcome.faults) == (3, 1)
  assert outcome.success == outcome.reward == pytest.approx(2 / 3)
  assert outcome.low < 2 / 3 < outcome.high
  empty = evaluate.summarise([played(None)], 1.0)
  assert math.isnan(empty.success)
  assert (empty.low, empty.high) == (0.0, 1.0)


@pytest.mark.parametrize(
  ("changes", "way_out"),
  [
    (
      {"optimizer_memory": "host"},
      r"^optimizer_memory=host .*; use optimizer_memory=device$",
    ),
    (
      {
        "model": dataclasses.replace(
          experiment().model, compute=model_config.Compute(remat="host")
        )
      },
      r"^model.compute.remat=host .* on metal; use model.compute.remat=layer$",
    ),
  ],
)
def test_memory_of_the_host_is_refused_where_there_is_none(changes, way_out):
  alone = types.SimpleNamespace(
    platform="metal",
    addressable_memories=lambda: [types.SimpleNamespace(kind="device")],
  )
  asking = experiment(**changes)
  with pytest.raises(ValueError, match=way_out):
    assemble.check_host_memory(asking, [alone])
  assemble.check_host_memory(asking, jax.devices())
  assemble.check_host_memory(experiment(), [alone])


def test_a_run_is_planned_for_the_devices_that_it_has():
  # Memory that is named is that of an accelerator; these are CPUs, whose
  # memory holds what is kept on the host.
  place = placement.Placement(colocated=True, device_gib=80.0)
  settings = experiment(placement=place, optimizer_memory="host")
  assert assemble.fit(settings).placement == place
  schedule = dataclasses.replace(settings.overlap, max_staleness=10**9)
  with pytest.raises(ValueError, match=r"of this host.*\n.*state \d+ KiB"):
    assemble.fit(dataclasses.replace(settings, overlap=schedule))
