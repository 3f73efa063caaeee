"""Resources in a planning problem: choices, their bounds, and the plan."""

import dataclasses

import pytest

from rl.planning import fleet, plan_config
from rl.planning import problem as problem_lib
from rl.planning import search as search_lib
from rl.rollout import grading, starting
from rl.simulation import distributions, hosts, resources, workload
from tests.helpers import planned_fleets

question = planned_fleets.question
# 8 episodes a round, each graded for 2 s in an environment for 2 s.
TASK = workload.Workload(
  prompt_tokens=distributions.Fixed(400.0),
  answer_tokens=distributions.Fixed(40.0),
  step_s=distributions.Fixed(2.0),
  reward_s=distributions.Fixed(2.0),
)
SYNC = problem_lib.Space(schedules=("sync",), points=1)
ONE = dataclasses.replace(
  planned_fleets.small_fleet().kinds[0], count=3, learner_devices=(1,)
)


@pytest.fixture(scope="module")
def process():
  with planned_fleets.untyped_process() as executor:
    yield executor


@pytest.fixture(scope="module")
def plan(process):
  """Returns the plan of a question, searched without checks of types."""
  return lambda problem: process.submit(
    planned_fleets.plan_of, problem
  ).result()


def asked(*, goal=None, space=SYNC, task=TASK, retries=None, **beside):
  """Returns a question about three devices and what a fleet has beside."""
  problem = question(workloads=(task,), goal=goal or problem_lib.Goal())
  rollout = dataclasses.replace(
    problem.rollout, grading=retries or grading.Retries()
  )
  return dataclasses.replace(
    problem,
    fleet=fleet.Fleet(kinds=(ONE,), transfer_s=0.5, **beside),
    space=space,
    rollout=rollout,
    rounds=2,
  )


SEATS = resources.Seats(cost=0.1)


def seats(*counts, **changes):
  space = dataclasses.replace(SYNC, reward_seats=counts)
  return asked(space=space, rewards=SEATS, **changes)


@pytest.mark.process
def test_the_fewest_seats_that_no_reward_waits_for_are_the_quickest(plan):
  # All 8 episodes end together; where none waits more seats change nothing, and
  # 64 are not simulated.
  found = plan(seats(1, 4, 8, 64))
  assert found.best.choice.reward_seats == 8
  tried = {one.choice.reward_seats for one in found.estimates}
  assert 64 not in tried
  assert found.complete


@pytest.mark.process
def test_a_goal_of_cost_takes_fewer_seats_unless_it_is_too_slow(plan):
  dear = dataclasses.replace(SEATS, cost=50.0)
  cheap = problem_lib.Goal(minimise="cost")
  problem = dataclasses.replace(
    seats(1, 8, goal=cheap),
    fleet=dataclasses.replace(seats(1).fleet, rewards=dear),
  )
  slow = plan(problem).best
  assert slow.choice.reward_seats == 1
  # 8 gradings of 2 s, one after the other.
  assert slow.result.step_s > 16.0
  limit = dataclasses.replace(cheap, max_step_s=10.0)
  quick = plan(dataclasses.replace(problem, goal=limit)).best
  assert quick.choice.reward_seats == 8
  assert quick.cost > slow.cost


@pytest.mark.process
def test_seats_that_lose_rewards_are_not_chosen_when_faults_are_bounded(plan):
  # With one seat most rewards wait for longer than a call may last, and a
  # step in which they are lost is short and cheap.
  retries = grading.Retries(deadline_s=5.0, attempts=1)
  cheap = problem_lib.Goal(minimise="cost")
  lossy = plan(seats(1, 8, goal=cheap, retries=retries)).best
  assert lossy.choice.reward_seats == 1
  assert lossy.result.fault_share > 0.5
  kept = dataclasses.replace(cheap, max_faults=0.0)
  found = plan(seats(1, 8, goal=kept, retries=retries))
  assert found.met
  assert found.best.choice.reward_seats == 8
  assert found.best.result.fault_share == 0.0


@pytest.mark.process
def test_the_fewest_hosts_with_room_for_all_are_the_quickest(plan):
  space = dataclasses.replace(SYNC, hosts=(1, 2, 4, 16))
  found = plan(asked(space=space, hosts=hosts.Hosts(slots=2)))
  assert found.best.choice.hosts == 4
  assert 16 not in {one.choice.hosts for one in found.estimates}


@pytest.mark.process
def test_kinds_that_suit_them_encode_and_decode(plan):
  # A token takes 0.1 s on "quick", and a context of 400 ids 4 s on "wide".
  slow = dataclasses.replace(
    planned_fleets.QUICK, tau0_s=0.1, prefill_per_s=1e5, interference=1.0
  )
  fast = dataclasses.replace(
    planned_fleets.QUICK, prefill_per_s=100.0, slots=8, interference=1.0
  )
  kinds = (
    dataclasses.replace(ONE, count=2, speed=slow),
    dataclasses.replace(ONE, name="wide", speed=fast, learner_devices=()),
  )
  link = resources.Link(bytes_per_s=1e9)
  problem = asked(space=dataclasses.replace(SYNC, prefill_points=1))
  beside = fleet.Fleet(kinds=kinds, transfer_s=0.5, handover=link, kv_bytes=1e3)
  found = plan(dataclasses.replace(problem, fleet=beside))
  assert found.best.choice.engines == (("wide", 3),)
  assert found.best.choice.prefill == ("quick", 1)
  assert "1 quick encode" in found.best.choice.split
  reason = plan_config.misfit(
    problem, found.best.choice, planned_fleets.guess_number_moe.get_config()
  )
  assert reason is not None
  assert "with role=prefill" in reason


def test_the_quickest_buckets_are_taken():
  # Small ones have their latency often, and one alone travels link by link.
  path = resources.WeightPath(
    size_bytes=8e9,
    links=(
      resources.Link(bytes_per_s=1e9, latency_s=0.5),
      resources.Link(bytes_per_s=1e9),
    ),
  )
  space = dataclasses.replace(SYNC, bucket_bytes=(1e8, 1e9, 8e9))
  problem = asked(space=space, weights=path)
  (choice, *_) = problem.choices()
  assert choice.bucket_bytes == 1e9
  # 8 buckets of 1.5 s, and the last one's second.
  assert problem.cluster(choice).hidden_s == pytest.approx(13.0)
  base = planned_fleets.guess_number_moe.get_config()
  planned = plan_config.apply(problem, choice, base)
  assert planned.publishing.bucket_bytes == 1_000_000_000


FAULTY = dataclasses.replace(planned_fleets.GAME, correlation=0.2)
NO_RETRY = dataclasses.replace(FAULTY, reward_fault=0.0)
RESTARTED = dataclasses.replace(NO_RETRY, restarts=True, start_fault=0.3)
WIDE_SPACE = problem_lib.Space(
  schedules=("sync", "strict_pipeline", "one_step_off", "in_flight"),
  max_staleness=1,
  extra_members=(0, 1),
  prefill_points=1,
  points=1,
  reward_seats=(1, 3),
  hosts=(1, 3),
)


@pytest.mark.process
@pytest.mark.parametrize(
  ("task", "deadline_s", "outages"),
  [
    (NO_RETRY, 30.0, ()),
    (FAULTY, 30.0, ()),
    (NO_RETRY, 1.0, ()),
    (RESTARTED, 30.0, ()),
    (NO_RETRY, 30.0, (hosts.Outage(start_s=3.0, down_s=5.0),)),
  ],
  ids=["plain", "retried rewards", "late rewards", "restarts", "outage"],
)
def test_no_run_with_resources_is_faster_than_its_bound(
  process, task, deadline_s, outages
):
  busy = dataclasses.replace(ONE.speed, interference=0.7)
  problem = asked(
    task=task,
    space=WIDE_SPACE,
    retries=grading.Retries(deadline_s=deadline_s),
    rewards=resources.Seats(),
    hosts=hosts.Hosts(slots=3, outages=outages),
    handover=resources.Link(bytes_per_s=1e8, latency_s=0.01),
  )
  kinds = (dataclasses.replace(ONE, speed=busy),)
  rollout = dataclasses.replace(
    problem.rollout, starting=starting.Starting(first_wait_s=0.1)
  )
  problem = dataclasses.replace(
    problem,
    fleet=dataclasses.replace(problem.fleet, kinds=kinds),
    rollout=rollout,
  )
  some = process.submit(planned_fleets.simulate_all, problem, 5).result()
  assert any(one.choice.prefill for one in some)
  for one in some:
    assert one.bound.step_s <= one.result.step_s, one.choice
    assert one.tokens <= one.bound.tokens


@pytest.mark.parametrize(
  ("start_s", "restarts", "vary"),
  [(59.0, True, False), (60.0, True, True), (60.0, False, False)],
)
def test_draws_vary_where_a_late_start_is_tried_again(start_s, restarts, vary):
  # Its deadline is rollout.step_s=60.
  task = dataclasses.replace(
    TASK, start_s=distributions.Fixed(start_s), restarts=restarts
  )
  assert asked(task=task).draws_vary == vary


def test_seats_and_slots_in_full_use_bound_a_step():
  problem = seats(1)
  (one, *_), _ = search_lib.candidates(problem)
  # 8 gradings of 2 s at one seat.
  assert one.bound.parts["seats"] == pytest.approx(16.0)
  assert one.bound.step_s > 16.0
  few = dataclasses.replace(SYNC, hosts=(1,))
  problem = asked(space=few, hosts=hosts.Hosts(slots=2))
  (one, *_), _ = search_lib.candidates(problem)
  # 8 of at least 2 s and 40 tokens of 0.01 (1 + 1 / 8) s, in 2 slots.
  assert one.bound.parts["hosts"] > 8 * (2.0 + 0.45) / 2
  assert one.bound.step_s > one.bound.parts["hosts"]


@pytest.mark.parametrize(
  ("problem", "words"),
  [
    (
      lambda: asked(space=dataclasses.replace(SYNC, reward_seats=(1,))),
      r"space\.reward_seats=\(1,\) without fleet\.rewards",
    ),
    (
      lambda: asked(space=dataclasses.replace(SYNC, prefill_points=2)),
      r"space\.prefill_points=2 without fleet\.handover",
    ),
    (
      lambda: asked(space=dataclasses.replace(SYNC, max_staleness=2**31)),
      r"space\.max_staleness=2147483648 must be in \[1, 1000\]",
    ),
    (
      lambda: dataclasses.replace(seats(1), seed=2**63),
      r"^seed=9223372036854775808 must be in \[0, 9223372036854775807\]",
    ),
    (
      lambda: dataclasses.replace(asked(), rounds=5000),
      # On policy the first round warms up: 5001 of 4 groups.
      r"rounds=5000 behind space\.max_staleness=4 are 20004 groups",
    ),
    (
      lambda: asked(
        space=problem_lib.Space(schedules=("one_step_off",), extra_groups=(2,))
      ),
      r"with extra_groups=\(2,\): extra groups need a bound of 0; add 0",
    ),
    (
      lambda: asked(task=dataclasses.replace(TASK, start_fault=1.0)),
      "nothing is sampled: no environment starts, by start_fault or within "
      "rollout.step_s=60",
    ),
    (lambda: seats(0), r"space\.reward_seats=\(?0"),
    (
      lambda: asked(hosts=hosts.Hosts(count=0)),
      r"hosts\.count=0 must be at least 1",
    ),
    (
      lambda: asked(goal=problem_lib.Goal(max_faults=1.5)),
      r"goal\.max_faults=1\.5",
    ),
    (
      lambda: dataclasses.replace(seats(1, 2, 3), max_choices=2),
      "3 choices are more than max_choices=2; lower space.points",
    ),
  ],
)
def test_resources_that_cannot_be_planned_are_refused(problem, words):
  with pytest.raises(ValueError, match=words):
    search_lib.candidates(problem())
