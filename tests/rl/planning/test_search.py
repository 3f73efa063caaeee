"""The planner against simulating everything, and its bounds against runs."""

import dataclasses
import functools

import pytest

from rl.planning import fleet, lower_bound, workload_demand
from rl.planning import problem as problem_lib
from rl.planning import search as search_lib
from rl.schedule import overlap
from rl.simulation import distributions, simulate, workload
from rl.simulation import result as simulation_result
from tests.helpers import planned_fleets

question = planned_fleets.question


@pytest.fixture(scope="module")
def process():
  with planned_fleets.untyped_process() as executor:
    yield executor


@pytest.fixture(scope="module")
def everything(process):
  """All choices of the small fleet, simulated."""
  estimates = process.submit(planned_fleets.simulate_all, question()).result()
  return {one.choice: one for one in estimates}


def key(problem, one):
  """Returns how good a run is for the goal of a question."""
  return problem.goal.key(
    one.result.step_s, problem.cost(one.choice), one.tokens, one.lag_mean
  )


def search(problem, everything):
  """Returns the plan, with the runs that are known."""

  def known(problem, candidate):
    one = everything[candidate.choice]
    return dataclasses.replace(one, key=key(problem, one))

  found = search_lib.candidates(problem)
  return search_lib.best_of(problem, *found, estimated=known)


GOALS = {
  "quick": problem_lib.Goal(),
  "cheap": problem_lib.Goal(minimise="cost"),
  "cheap tokens": problem_lib.Goal(minimise="cost_per_token"),
  "cheap in time": problem_lib.Goal(minimise="cost", max_step_s=2.4),
  "quick for little": problem_lib.Goal(max_cost=12.0),
  "quick and fresh": problem_lib.Goal(max_mean_lag=0.5),
  "impossible": problem_lib.Goal(max_step_s=1.0),
}


@pytest.mark.process
@pytest.mark.parametrize("name", GOALS)
def test_the_plan_is_the_best_of_all_choices(everything, name):
  problem = question(goal=GOALS[name])
  plan = search(problem, everything)
  assert plan.complete
  best = min(key(problem, one) for one in everything.values())
  assert plan.best.key == best
  assert plan.met == (name != "impossible")


@pytest.mark.process
def test_the_plan_is_found_with_far_fewer_runs(everything):
  # 8 splits: with one device that trains 3 x 2 - 1 ways to decode, with two
  # 2 x 2 - 1; and 7 schedules.
  plan = search(question(), everything)
  assert plan.choices == len(everything) == 56
  assert len(plan.estimates) < plan.choices / 2


@pytest.mark.process
def test_a_bound_on_the_mean_lag_is_kept_and_costs_time(everything):
  quick = search(question(), everything)
  fresh = search(question(goal=GOALS["quick and fresh"]), everything)
  assert fresh.best.lag_mean <= 0.5 < quick.best.lag_mean
  assert fresh.best.result.step_s > quick.best.result.step_s


def test_orders_of_training_and_kinds_of_publish_are_in_the_space():
  space = problem_lib.Space(
    schedules=("bounded", "in_flight"),
    max_staleness=1,
    consume=("submit", "drop"),
    on_publish=("recompute", "keep_kv"),
  )
  names = [name for name, schedule in space.overlaps(8)]
  assert names == [
    "bounded(1)",
    "bounded(1) drop",
    "in_flight(1)",
    "in_flight(1) keep_kv",
    "in_flight(1) drop",
    "in_flight(1) drop keep_kv",
  ]
  for _, schedule in space.overlaps(8):
    schedule.validate()


def test_one_step_off_stands_for_one_order_of_training_alone():
  space = problem_lib.Space(
    schedules=("one_step_off", "bounded"),
    max_staleness=1,
    consume=("submit", "drop"),
  )
  names = [name for name, _ in space.overlaps(8)]
  assert names == ["one_step_off", "bounded(1) drop"]


@pytest.mark.process
def test_a_tolerance_saves_runs_and_costs_no_more_than_it_says(everything):
  exact = search(question(), everything)
  rough = search(question(tolerance=0.1), everything)
  assert len(rough.estimates) < len(exact.estimates)
  best = exact.best.result.step_s
  assert best <= rough.best.result.step_s <= best / (1.0 - 0.1)


@pytest.mark.process
def test_no_run_is_faster_than_its_bound(everything):
  for one in everything.values():
    assert one.bound.step_s <= one.result.step_s, one.choice
    assert one.tokens <= one.bound.tokens
    assert not one.result.violations


LONG = workload.Workload(
  name="long",
  answer_tokens=distributions.LogNormal(mean=100.0, sigma=1.2, max_value=400.0),
)
MIXES = {
  "long": (LONG,),
  "games": (planned_fleets.GAME,),
  "both": (LONG, dataclasses.replace(planned_fleets.GAME, share=2.0)),
}
REDUNDANT = problem_lib.Space(
  max_staleness=3,
  updates_per_round=2,
  extra_groups=(0, 1),
  extra_members=(0, 1),
)


@pytest.mark.process
@pytest.mark.parametrize(
  ("mix", "seed"),
  [
    ("long", 1),
    pytest.param("both", 3, marks=pytest.mark.slow),
    pytest.param("games", 2, marks=pytest.mark.slow),
  ],
)
def test_the_bound_holds_for_every_schedule_redundancy_and_mix(
  process, mix, seed
):
  problem = question(workloads=MIXES[mix], space=REDUNDANT, seed=seed, rounds=5)
  waiting, _ = search_lib.candidates(problem)
  some = waiting[seed :: len(waiting) // 17]
  for one in process.map(functools.partial(search_lib.estimate, problem), some):
    assert one.bound.step_s <= one.result.step_s, one.choice
    assert one.tokens <= one.bound.tokens


def test_the_bound_is_exact_where_nothing_varies_or_queues():
  # 4 groups of 2 answers of 100 tokens fill two engines of 4 slots: a token
  # takes 0.01 (1 + 4 / 8) = 0.015 s, all of them 1.5 s. Training is 8 x 120
  # ids of 1 ms and an update of 0.2 s, a publish 0.5 s and 0.3 s.
  problem = question(
    workloads=(
      workload.Workload(
        prompt_tokens=distributions.Fixed(20.0),
        answer_tokens=distributions.Fixed(100.0),
      ),
    )
  )
  speed = dataclasses.replace(planned_fleets.QUICK, prefill_per_s=float("inf"))
  cluster = simulate.Cluster(
    learner=fleet.DeviceKind(
      name="one", count=1, token_s=1e-3, update_s=0.2
    ).learner(1),
    pools=(simulate.EnginePool(engines=2, speed=speed),),
    transfer_s=0.5,
  )
  needs = workload_demand.of(problem, overlap.Redundancy())
  bound = lower_bound.of_choice(
    needs, cluster, overlap.sync(4), problem.window, group_size=2
  )
  assert bound.step_s == pytest.approx(1.5 + 0.96 + 0.2 + 0.8, rel=1e-4)
  assert bound.parts["decode"] == pytest.approx(1.5)
  assert bound.parts["learner"] == pytest.approx(1.16)
  assert bound.tokens == 800
  record = simulate.simulate(
    simulate.Simulation(
      cluster=cluster,
      workloads=problem.workloads,
      overlap=overlap.sync(4),
      rollout=problem.rollout,
      rounds=4,
    )
  )
  result = simulation_result.measure(record)
  assert result.step_s == pytest.approx(bound.step_s, rel=1e-4)


@pytest.mark.parametrize(
  "schedule",
  [
    overlap.rollout_pipe(4, 2),
    overlap.strict_pipeline(4),
    overlap.bounded(4, 2),
  ],
)
def test_the_bound_holds_for_micro_batches_by_tokens(schedule):
  problem = question(workloads=(LONG,), rounds=5)
  waiting, _ = search_lib.candidates(problem)
  budget = {"groups_per_microbatch": None, "tokens_per_microbatch": 300}
  by_tokens = dataclasses.replace(schedule, **budget)
  choice = dataclasses.replace(waiting[0].choice, overlap=by_tokens)
  bound = lower_bound.of_choice(
    workload_demand.of(problem, overlap.Redundancy()),
    problem.cluster(choice),
    by_tokens,
    problem.window,
    problem.rollout.group_size,
  )
  record = simulate.simulate(problem.simulated(choice))
  assert bound.step_s <= simulation_result.measure(record).step_s


@pytest.mark.process
def test_the_same_question_has_the_same_answer(process):
  problem = question(max_simulations=2)
  first = planned_fleets.plan_of(problem)
  second = process.submit(planned_fleets.plan_of, problem).result()
  assert [e.choice for e in first.estimates] == [
    e.choice for e in second.estimates
  ]
  assert [e.key for e in first.estimates] == [e.key for e in second.estimates]


@pytest.mark.process
def test_what_binds_is_the_learner_when_it_is_slow_and_decoding_when_it_is(
  process,
):
  slow, quick = (
    dataclasses.replace(kind, token_s=token_s)
    for kind, token_s in ((_learner(), 5e-2), (_learner(), 1e-5))
  )
  for kind, expected in ((slow, {"learner"}), (quick, {"decode", "tail"})):
    problem = question(
      fleet=planned_fleets.small_fleet(kinds=(kind,)),
      workloads=(planned_fleets.MATH,),
    )
    plan = process.submit(planned_fleets.plan_of, problem).result()
    assert plan.best.bound_by in expected


def _learner():
  return planned_fleets.small_fleet().kinds[0]


@pytest.mark.process
def test_the_largest_lag_that_is_allowed_decides_which_schedules_are_tried(
  everything,
):
  problem = question(goal=problem_lib.Goal(max_lag=0))
  plan = search(problem, everything)
  assert plan.best.lag_max == 0
  assert all(not c.overlap.max_staleness for c in problem.choices())


def test_choices_that_do_not_fit_are_left_out_with_their_reason():
  plan = planned_fleets.plan_of(
    question(max_simulations=2),
    lambda choice: "two are too many" if choice.devices == 2 else "",
  )
  assert plan.refused["two are too many"] > 0
  assert all(one.choice.devices == 1 for one in plan.estimates)
  with pytest.raises(ValueError, match=r"none of \d+ choices fits.*no way"):
    planned_fleets.plan_of(question(), lambda choice: "no way")


def test_a_search_that_is_cut_off_says_so():
  plan = planned_fleets.plan_of(question(max_simulations=1))
  assert len(plan.estimates) == 1
  assert not plan.complete


def kind(**changes):
  return dataclasses.replace(_learner(), **changes)


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    (
      {"fleet": fleet.Fleet(kinds=(kind(count=1, learner_devices=(1,)),))},
      "1 devices of quick train.* nothing decodes; raise count",
    ),
    (
      {"fleet": fleet.Fleet(kinds=(kind(learner_devices=()),))},
      "none has learner_devices, so nothing trains",
    ),
    (
      {"fleet": fleet.Fleet(kinds=(kind(learner_devices=(4,)),))},
      r"learner_devices=\(4,\) must be 1 to count=3 each",
    ),
    ({"fleet": fleet.Fleet(kinds=())}, r"fleet.kinds: \[\] are not one"),
    (
      {"fleet": fleet.Fleet(kinds=(kind(cost=0.0),))},
      r"fleet.kinds.0.cost=0.0 must be a finite number above 0",
    ),
    (
      {"space": problem_lib.Space(schedules=("in_fligth",))},
      "space.schedules=in_fligth is unknown.* did you mean in_flight",
    ),
    (
      {"goal": problem_lib.Goal(minimise="time")},
      "goal.minimise=time is unknown; use step_s, cost",
    ),
    (
      {
        "goal": problem_lib.Goal(max_lag=0),
        "space": problem_lib.Space(schedules=("in_flight",)),
      },
      "goal.max_lag=0 is below what every schedule.* nearest is max_lag=1",
    ),
    (
      {"space": problem_lib.Space(updates_per_round=3)},
      "space.updates_per_round=3 does not divide groups_per_round=4",
    ),
    ({"rounds": 0}, "rounds=0 must be at least 1"),
    (
      {"space": problem_lib.Space(points=0)},
      "space.points=0 must be at least 1$",
    ),
    ({"tolerance": 1.0}, r"tolerance=1.0 must be in \[0, 1\)"),
    (
      {"routing": problem_lib.affinity.Routing(prefer={"game": "quick"})},
      "routing.prefer.game=quick is unknown; use compute",
    ),
  ],
)
def test_what_cannot_be_planned_is_refused_before_anything_runs(changes, words):
  with pytest.raises(ValueError, match=words):
    search_lib.fitting(question(**changes))


def test_tasks_without_room_for_an_answer_are_refused():
  endless = dataclasses.replace(
    planned_fleets.MATH, prompt_tokens=distributions.Fixed(1200.0)
  )
  with pytest.raises(ValueError, match=r"nothing is sampled.*max_tokens=1200"):
    planned_fleets.plan_of(question(workloads=(endless,)))
