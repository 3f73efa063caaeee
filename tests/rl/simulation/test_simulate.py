"""Simulated runs: by hand if all is constant, otherwise by order."""

import dataclasses
import json
import math

import pytest

from rl.audit import checker, event_log, token_ledger
from rl.loop import progress
from rl.runtime import trace, watchdog
from rl.schedule import overlap
from rl.simulation import distributions, simulate
from rl.simulation import learner as simulated_learner
from rl.simulation import processor as simulated_processor
from rl.simulation import result as simulation_result
from tests.helpers import simulated_runs

CONSTANT, HEAVY, AGENT = (
  simulated_runs.CONSTANT,
  simulated_runs.HEAVY,
  simulated_runs.AGENT,
)
SPEED, close = simulated_runs.SPEED, simulated_runs.close
settings, run = simulated_runs.settings, simulated_runs.run


def test_a_synchronous_round_is_the_sum_of_its_parts():
  result = run(overlap.sync(4))
  # 8 answers of 100 tokens on 8 slots: 2 s. The learner: 8 x 102 ids of 1 ms
  # and an update. The publish: 3 s on the way and 2 s to be taken.
  assert result.decode_s == close(2.0)
  assert result.train_s == close(0.816 + 1.0)
  assert result.publish_s == close(5.0)
  assert result.step_s == close(2.0 + 1.816 + 5.0)
  assert result.ideal_s == close(2.0 + 2.0)
  # All groups end at once, so nothing on-policy could be faster.
  assert result.on_policy_efficiency == close(1.0)
  assert result.overlap == 0.0
  assert result.tokens == 800


def test_idle_time_of_a_synchronous_round_has_its_causes():
  result = run(overlap.sync(4))
  step_s = 8.816
  # Decoding goes on until the groups have ended; then the gate is shut.
  assert result.decode_idle["publish"] == close(2.0 / step_s)
  assert result.decode_idle["gate"] == close((1.816 + 3.0) / step_s)
  assert result.decode_idle["environments"] == 0.0
  assert result.learner_idle["data"] == close(2.0 / step_s)
  assert result.learner_idle["publish"] == close(5.0 / step_s)
  assert result.decode_use == close(2.0 / step_s)


def test_one_step_off_takes_the_longer_of_both_and_the_publish():
  schedule = overlap.one_step_off(4)
  # Training 8 x 502 ids and an update, 5.016 s, hides 2 s of decoding; the
  # transfer goes on beside the next round, and decoding stands 2 s for it.
  slow = dataclasses.replace(CONSTANT, prompt_tokens=distributions.Fixed(402.0))
  result = run(schedule, slow, rounds=8)
  assert result.train_s == close(5.016)
  assert 5.016 <= result.step_s <= 2.0 + 5.016
  assert set(result.group_lags) == {1}
  assert set(result.token_lags) == {1}


def test_in_flight_the_step_is_that_of_the_learner_when_it_is_slower():
  slow = dataclasses.replace(
    CONSTANT, prompt_tokens=distributions.Fixed(1202.0)
  )
  result = run(overlap.in_flight(4, 2), slow, rounds=10)
  # 8 x 1302 ids and an update; the publish of 5 s goes on meanwhile.
  assert result.train_s == close(11.416)
  assert result.step_s == close(11.416)
  assert result.learner_idle["data"] == close(0.0)
  assert result.overlap > 0.5


def test_with_a_bound_of_1_a_hidden_transfer_costs_what_an_exposed_one_does():
  # Environments need 40 s to start, and decoding next to none. Two rounds take
  # that, a training and a transfer: it is in the way of the next admission.
  waits = dataclasses.replace(
    CONSTANT,
    start_s=distributions.Fixed(40.0),
    answer_tokens=distributions.Fixed(1.0),
  )
  plain = settings(overlap.in_flight(4, 1), waits, rounds=14)

  def step_s(transfer_s, stop_s):
    speed = dataclasses.replace(SPEED, update_s=stop_s)
    cluster = dataclasses.replace(
      plain.cluster,
      transfer_s=transfer_s,
      pools=(simulate.EnginePool(engines=1, speed=speed),),
    )
    record = simulate.simulate(dataclasses.replace(plain, cluster=cluster))
    return simulation_result.measure(record).step_s

  hidden, exposed, shorter = (
    step_s(8.0, 1.0),
    step_s(0.0, 9.0),
    step_s(0.0, 3.0),
  )
  assert hidden == pytest.approx(exposed, rel=0.01)
  assert shorter < hidden - 2.0


MODES = {
  "sync": overlap.sync(8),
  "strict": overlap.strict_pipeline(8, groups_per_microbatch=2),
  "pipe by tokens": dataclasses.replace(
    overlap.rollout_pipe(8, 2),
    groups_per_microbatch=None,
    tokens_per_microbatch=10_000,
  ),
  "one step off": overlap.one_step_off(8),
  "keep kv": overlap.in_flight(8, 2, on_publish="keep_kv"),
  "drop": dataclasses.replace(overlap.in_flight(8, 1), consume="drop"),
  "redundant": dataclasses.replace(
    overlap.sync(8),
    consume="ready",
    redundancy=overlap.Redundancy(extra_groups=2, extra_members=1),
  ),
}


@pytest.mark.parametrize("mode", MODES)
def test_schedules_keep_their_promises_with_tails_and_faults(mode):
  schedule = MODES[mode]
  result = run(schedule, HEAVY, AGENT, engines=2, rounds=7)
  assert list(result.violations) == []
  assert result.ledger.error == 0
  assert max(result.group_lags) <= schedule.max_staleness
  assert sum(result.group_lags.values()) == 8 * result.rounds
  busy = sum(result.decode_idle.values()) + result.prefill
  assert 0.0 < busy < 1.0
  assert 0.0 < result.useful <= 1.0
  assert result.efficiency < 1.1


@pytest.fixture(scope="module")
def ladder():
  """Results on one trace: heavy tails, and a learner as fast as decoding."""
  schedules = {
    "sync": (overlap.sync(8, 4), 8),
    "pipe": (
      dataclasses.replace(overlap.rollout_pipe(8, 4), consume="ready"),
      8,
    ),
    "one step off": (overlap.one_step_off(8), 9),
    "eta 1": (overlap.in_flight(8, 1), 9),
    "eta 4": (overlap.in_flight(8, 4), 14),
  }
  cluster = simulate.Cluster(
    # A round is 8 x 4 x 100 tokens: 3.2 s of training, 4 s of decoding.
    learner=simulated_learner.LearnerSpeed(token_s=1e-3, update_s=0.0),
    pools=(
      simulate.EnginePool(
        engines=2,
        speed=dataclasses.replace(SPEED, update_s=0.1),
      ),
    ),
    transfer_s=0.1,
  )
  return {
    name: run(schedule, HEAVY, size=4, rounds=rounds, cluster=cluster)
    for name, (schedule, rounds) in schedules.items()
  }


def test_the_more_staleness_is_allowed_the_faster_a_round(ladder):
  steps = [result.step_s for result in ladder.values()]
  assert steps == sorted(steps, reverse=True)
  # As in the published comparisons: below 2 on-policy, above it in flight.
  sync, pipe = ladder["sync"].step_s, ladder["pipe"].step_s
  assert 1.05 < sync / pipe < 2.0
  assert sync / ladder["eta 4"].step_s > 1.8


def test_only_in_flight_comes_near_the_ideal(ladder):
  assert ladder["eta 4"].efficiency > 0.85
  assert ladder["one step off"].efficiency < ladder["eta 4"].efficiency
  assert ladder["sync"].efficiency < 0.6


def test_a_pipeline_is_near_its_on_policy_bound(ladder):
  assert 0.9 < ladder["pipe"].on_policy_efficiency <= 1.0 + 1e-6
  assert ladder["eta 1"].on_policy_efficiency is None


def test_a_run_that_stalls_says_how_long_it_waited():
  simulated = settings(overlap.sync(4), progress_timeout_s=1.5)
  with pytest.raises(watchdog.Stalled, match=r"learner waited 1\.5 s for 4 gr"):
    simulate.simulate(simulated)


def test_overlap_grows_with_what_may_run_at_once(ladder):
  assert ladder["sync"].overlap == 0.0
  assert 0.0 < ladder["pipe"].overlap < ladder["eta 4"].overlap


def test_the_same_seed_repeats_the_same_run():
  simulated = settings(overlap.in_flight(4, 1), AGENT, rounds=5)
  first = simulate.simulate(simulated)
  assert simulate.simulate(simulated).events == first.events
  other = dataclasses.replace(simulated, seed=1)
  assert simulate.simulate(other).events != first.events


def test_turns_that_are_not_kept_are_counted_and_checked_all_the_same():
  simulated = settings(overlap.in_flight(4, 1), AGENT, rounds=5)
  whole = simulate.simulate(simulated)
  short = simulate.simulate(simulated, keep_turns=False)
  group_size = simulated.rollout.group_size
  without = [e for e in whole.events if e["kind"] != "turn"]
  assert short.events == without
  assert short.num_turns == len(whole.events) - len(without) > 0
  assert short.num_events == len(whole.events)
  assert short.ledger == token_ledger.of(whole.events)
  # Every episode would have ended without its turns.
  assert not short.violations
  assert checker.violations(short.events, simulated.overlap, group_size)


class _Boundaries(progress.RunObserver):
  def __init__(self):
    self.trained = []

  async def on_boundary(self, progress):
    self.trained.append(progress.trained)


def test_a_run_with_a_directory_has_its_log_there_and_not_in_memory(tmp_path):

  simulated = settings(overlap.in_flight(4, 1), AGENT, size=4)
  kept = simulate.simulate(simulated)
  observer = _Boundaries()
  record = simulate.simulate(simulated, run_dir=tmp_path, observer=observer)
  log = list(event_log.LogFile(tmp_path / "events.jsonl"))
  assert log == json.loads(json.dumps(kept.events))
  assert list(trace.read(tmp_path / "spans.jsonl")) == kept.spans
  assert (record.events, record.spans, record.served) == ([], [], {})
  # What has changed since the last update.
  assert [len(states) < 10 for states in record.states] == [True]
  assert record.ledger == kept.ledger
  assert observer.trained == [1, 2, 3, 4, 5, 6]


def test_sessions_go_where_the_routing_says():
  pools = (
    simulate.EnginePool(name="fast", engines=1, speed=SPEED, kind="compute"),
    simulate.EnginePool(name="wide", engines=1, speed=SPEED, kind="bandwidth"),
  )
  simulated = settings(
    overlap.sync(4),
    HEAVY,
    AGENT,
    cluster=simulate.Cluster(pools=pools),
  )
  routing = dataclasses.replace(
    simulated.routing, prefer={"agent": "compute", "math": "wide"}
  )
  record = simulate.simulate(dataclasses.replace(simulated, routing=routing))
  sources = {
    (e["group"], e["attempt"]): e["source"]
    for e in record.events
    if e["kind"] == "submitted"
  }
  homes = {
    (sources[e["group"], e["attempt"]], e["engine"])
    for e in record.events
    if e["kind"] == "admitted"
  }
  assert homes == {("agent", 0), ("math", 1)}


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"rounds": 2}, r"rounds=2 leaves none to measure.* use rounds=7"),
    (
      {"rounds": 2, "overlap": overlap.in_flight(4, 2)},
      # Three rounds may take turns, so 6 are measured.
      r"rounds=2 leaves none to measure.* use rounds=11",
    ),
    ({"seed": -1}, r"seed=-1 must be in \[0, 9223372036854775807\]"),
    ({"seed": 2**63}, r"seed=9223372036854775808 must be in \[0, "),
    ({"workloads": ()}, r"workloads: \[\] are not"),
    ({"workloads": (HEAVY, HEAVY)}, "are not one or more names"),
    ({"progress_timeout_s": 0.0}, "progress_timeout_s=0.0 must be above 0"),
    ({"cluster": simulate.Cluster(pools=())}, "nothing decodes"),
    (
      {"cluster": simulate.Cluster(transfer_s=math.inf)},
      r"cluster.transfer_s=inf must be a finite number of at least 0",
    ),
    (
      {
        "cluster": simulate.Cluster(
          learner=simulated_learner.LearnerSpeed(token_s=math.inf)
        )
      },
      r"cluster.learner.token_s=inf must be a finite number of at least 0",
    ),
    (
      {"cluster": simulate.Cluster(transfer_s=-1.0)},
      r"cluster.transfer_s=-1.0 must be a finite number of at least 0",
    ),
    (
      {"cluster": simulate.Cluster(pools=(simulate.EnginePool(engines=0),))},
      r"cluster.pools.0.engines=0 must be at least 1",
    ),
    (
      {
        "cluster": simulate.Cluster(
          learner=simulated_learner.LearnerSpeed(token_s=-1.0)
        )
      },
      r"cluster.learner.token_s=-1.0 must be a finite number of at least 0",
    ),
    (
      {
        "cluster": simulate.Cluster(
          pools=(
            simulate.EnginePool(
              speed=simulated_processor.Speed(kv_tokens=5000)
            ),
          )
        )
      },
      r"speed.kv_tokens=5000 is below rollout.max_tokens=10000",
    ),
  ],
)
def test_what_cannot_run_is_refused_before_anything_runs(changes, words):
  with pytest.raises(ValueError, match=words):
    settings(overlap.in_flight(4, 1), **changes).validate()
