"""Processes of a simulated run: their seconds, worked out by hand."""

import asyncio
import dataclasses

import numpy as np
import pytest

from rl.engine import contract
from rl.schedule import overlap
from rl.simulation import engine as simulated_engine
from rl.simulation import processes, simulate
from rl.simulation import processor as simulated_processor
from rl.simulation import result as simulation_result
from tests.helpers import simulated_runs

pytestmark = pytest.mark.virtual_time

close = simulated_runs.close
COSTS = processes.ProcessCosts(call_s=0.2, copy_s=0.5)


def measure(schedule, learners, engines, *workloads, rounds=6):
  """Returns what a run is worth whose engines have processes of their own."""
  plain = simulated_runs.settings(
    schedule, *workloads, engines=engines, rounds=rounds
  )
  (pool,), learner = plain.cluster.pools, plain.cluster.learner
  cluster = dataclasses.replace(
    plain.cluster,
    learner=dataclasses.replace(learner, processes=learners),
    pools=(dataclasses.replace(pool, processes=1),),
    processes=COSTS,
  )
  record = simulate.simulate(dataclasses.replace(plain, cluster=cluster))
  return cluster, simulation_result.measure(record)


@pytest.mark.parametrize(
  ("learners", "engines", "decode_s", "publish_s"),
  [
    # 8 answers of 100 tokens on 8 slots: 2 s, on 16 of two engines 1.5 s. The
    # publish: 3 s on the way, a copy of 0.5 s, a call and a copy of 0.7 s for
    # each engine, 2 s to be taken, and a call of 0.2 s for that.
    (1, 1, 2.0, 3.0 + 0.5 + 0.7 + 2.2),
    (1, 2, 1.5, 3.0 + 0.5 + 2 * 0.7 + 2.2),
    # Before that a call, half a copy by each process and a copy that is read.
    (2, 1, 2.0, 0.2 + 0.25 + 0.5 + 3.0 + 0.5 + 0.7 + 2.2),
    (2, 2, 1.5, 0.2 + 0.25 + 0.5 + 3.0 + 0.5 + 2 * 0.7 + 2.2),
  ],
)
def test_a_round_has_the_calls_and_copies_of_its_processes(
  learners, engines, decode_s, publish_s
):
  cluster, result = measure(overlap.sync(4), learners, engines)
  assert result.publish_s == close(publish_s) == close(cluster.publish_s)
  # A call for the batch, and one for the optimizer step.
  train_s = 0.816 + 1.0 + 2 * 0.2 * (learners > 1)
  assert result.train_s == close(train_s)
  # An answer comes back a call later than it is sampled.
  assert result.step_s == close(decode_s + 0.2 + train_s + publish_s)


@pytest.mark.parametrize(
  "schedule", [overlap.one_step_off(8), overlap.in_flight(8, 1)]
)
def test_schedules_keep_their_promises_with_processes(schedule):
  _, result = measure(
    schedule, 2, 2, simulated_runs.HEAVY, simulated_runs.AGENT, rounds=7
  )
  assert list(result.violations) == []
  assert result.ledger.error == 0


async def test_a_fetch_waits_for_the_command_before_it():
  gang, loop = processes.SimulatedGang(COSTS, 2), asyncio.get_running_loop()
  training = asyncio.create_task(gang.command(4.0))
  await asyncio.sleep(1.0)
  await gang.fetch()
  await training
  # The command until 4.2 s, then 0.2 s and 0.25 s, and 0.5 s here.
  assert loop.time() == close(4.2 + 0.45 + 0.5)


def called(length=100):
  """Returns an engine from another process that samples 50 tokens a second."""
  speed = dataclasses.replace(simulated_runs.SPEED, b0=1.0, tau0_s=0.01)
  assert isinstance(speed, simulated_processor.Speed)
  return processes.called(
    simulated_engine.SimulatedEngine(speed, lambda request: length), COSTS
  )


def request(max_tokens=1000):
  return contract.DecodeRequest(
    request_id="0",
    session="0",
    tokens=np.zeros(2, np.int32),
    max_tokens=max_tokens,
    seed=0,
  )


async def test_the_first_version_is_known_until_the_answer_is_back():
  engine, known = called(), []
  answer = asyncio.create_task(engine.generate(request()))
  # On its way, sampled from 0.1 s to 2.1 s, and on its way back.
  for at_s in (0.05, 1.0, 2.15):
    await asyncio.sleep(at_s - asyncio.get_running_loop().time())
    known.append(engine.begun("0"))
  await answer
  with pytest.raises(ValueError, match="not in flight"):
    engine.begun("0")
  end_s = asyncio.get_running_loop().time()
  assert known == [None, 0, 0]
  assert end_s == close(2.2)


@pytest.mark.parametrize(("at_s", "tokens"), [(0.0, 1), (1.0, 51)])
async def test_an_abort_arrives_as_late_as_a_request(at_s, tokens):
  engine = called()
  answer = asyncio.create_task(engine.generate(request()))
  await asyncio.sleep(at_s)
  engine.abort("0")
  answer = await answer
  end_s = asyncio.get_running_loop().time()
  assert answer.stop == "abort"
  # The token under way counts.
  assert len(answer.tokens) == tokens
  # There and back, of the abort.
  assert end_s == close(at_s + 0.2)


def test_it_takes_weights_as_one_that_stages():
  assert isinstance(called(), contract.StagingEngine)


@pytest.mark.parametrize(
  ("part", "setting"),
  [
    (processes.ProcessCosts(call_s=-1.0), r"cluster\.processes\.call_s=-1"),
    (processes.ProcessCosts(copy_s=-1.0), r"cluster\.processes\.copy_s=-1"),
  ],
)
def test_processes_faster_than_time_are_refused(part, setting):
  with pytest.raises(ValueError, match=setting):
    part.validate()


def test_an_engine_of_several_processes_is_refused():
  with pytest.raises(ValueError, match=r"pool\.processes=2"):
    simulate.EnginePool(processes=2).validate("pool")
