"""The command of the planner: its table, its errors, the config it writes."""

import dataclasses
import io
import math
import re

import pytest
from absl.testing import flagsaver

from configs import fleet_small, guess_number_moe
from launch import plan
from launch.cli import flags
from rl.planning import fleet, plan_config, search
from rl.planning import problem as problem_lib
from rl.pools import placement
from tests.helpers import commands, planned_fleets

BASE = commands.ROOT / commands.CONFIG

FLEET = '''"""Four devices for a short game."""
from tests.helpers import planned_fleets

get_config = planned_fleets.guessing
'''
TIGHT = '''"""A run on devices with next to no memory."""
import dataclasses
from configs import guess_number_moe
from rl.backends import ray_cluster

def get_config():
  base = guess_number_moe.get_config()
  backend = ray_cluster.Ray(resources={"rack": 1})
  place = dataclasses.replace(
    base.placement, device_gib=1e-4, backend=backend, decode_processes=1
  )
  return dataclasses.replace(base, placement=place)
'''
question = planned_fleets.guessing


@pytest.fixture
def fleet_file(tmp_path):
  file = tmp_path / "fleet.py"
  file.write_text(FLEET)
  return file


def refused(capsys, *arguments):
  """Returns what the command says before it ends without a plan."""
  with flagsaver.flagsaver():
    flags.parse(["plan", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
      plan.main(["plan"])
  said = capsys.readouterr()
  assert ended.value.code == 2
  assert said.out == ""
  *_, last = said.err.splitlines()
  assert last.startswith("more: twinmesh explain TM-")
  return said.err


@pytest.mark.process
def test_the_command_prints_a_plan_and_writes_a_config_that_trains(
  tmp_path, fleet_file
):
  out = tmp_path / "plans" / "best.py"
  given = [f"--config={fleet_file}", f"--base={BASE}", f"--out={out}"]
  done = commands.launch("launch.plan", *given)
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith("devices that train | engines")
  assert "the bound of no other one is better" in done.stdout
  planned_run = flags.load(str(out))
  base = guess_number_moe.get_config()
  assert planned_run.environment == base.environment
  assert planned_run.overlap.groups_per_round == 4
  # The file says what is expected of it.
  best = next(x for x in done.stdout.splitlines() if x.startswith("plan: "))
  split, schedule = best.removeprefix("plan: ").split(", ")
  assert out.read_text().startswith(f'"""A plan: {schedule}, {split}.')


def test_the_written_config_is_the_base_with_the_choice(tmp_path):
  problem, base = question(), guess_number_moe.get_config()
  for number, choice in enumerate(problem.choices()):
    if plan_config.misfit(problem, choice, base):
      continue
    out = tmp_path / f"plan_{number}.py"
    out.write_text(
      plan_config.source(
        problem,
        choice,
        base,
        name=out.name,
        base_path=str(BASE),
        summary="As a test.",
      )
    )
    assert flags.load(str(out)) == plan_config.apply(problem, choice, base)


def test_a_config_finds_its_base_from_anywhere(tmp_path, monkeypatch):
  # A config of the package, and one that is beside what a link leads to.
  there, link = tmp_path / "there" / "plans", tmp_path / "link"
  there.mkdir(parents=True)
  link.symlink_to(there)
  (tmp_path / "b.py").write_text(
    "from configs import guess_number_moe\n"
    "def get_config(name):\n  return guess_number_moe.get_config()\n"
  )
  monkeypatch.chdir(tmp_path)
  problem = dataclasses.replace(question(), max_simulations=1)
  base = guess_number_moe.get_config()
  found = search.best_of(problem, *search.candidates(problem))
  for path in ("configs/guess_number_moe.py", "b.py:x"):
    plan.write(found, problem, base, path, link / "best.py")
    planned_run = flags.load(str(there / "best.py"))
    assert planned_run.environment == base.environment


def test_what_a_plan_is_made_of_is_not_replaced(capsys, tmp_path, fleet_file):
  own = tmp_path / "base.py"
  own.write_text(BASE.read_text())
  given = [f"--config={fleet_file}", f"--base={own}"]
  for out in (own, fleet_file):
    assert "would replace a file" in refused(capsys, *given, f"--out={out}")


def test_preferences_of_tasks_that_the_base_has_not_are_left_out():
  base, problem = guess_number_moe.get_config(), planned_fleets.question()
  guessing = {planned_fleets.GUESSES.name: "compute"}
  both = dataclasses.replace(
    problem.routing, prefer={"game": "any", **guessing}
  )
  problem = dataclasses.replace(problem, routing=both)
  assert plan_config.routing(problem, base).prefer == guessing


def test_devices_of_a_kind_lie_side_by_side_its_learner_first():
  problem = question()
  choice = next(
    c
    for c in problem.choices()
    if c.devices == 1 and c.engines == (("quick", 2), ("wide", 1))
  )
  place = plan_config.apply(
    problem, choice, guess_number_moe.get_config()
  ).placement
  assert place.ranges == (range(1), range(1, 2), range(2, 3), range(3, 4))
  assert [pool.name for pool in place.pools] == ["decode", "wide"]
  assert [pool.kind for pool in place.pools] == ["compute", "bandwidth"]
  assert [pool.cost for pool in place.pools] == [3.0, 1.0]


def test_a_device_kind_that_trains_may_come_after_one_that_decodes():
  kinds = tuple(reversed(planned_fleets.small_fleet().kinds))
  problem = dataclasses.replace(question(), fleet=fleet.Fleet(kinds=kinds))
  choice = next(c for c in problem.choices() if c.engines == (("wide", 1),))
  place = plan_config.apply(
    problem, choice, guess_number_moe.get_config()
  ).placement
  # The one wide device is number 0, the quick ones follow.
  assert place.ranges == (range(1, 2), range(1))


@pytest.mark.parametrize(
  "learner", [placement.MeshSpec(expert=2), placement.MeshSpec(context=2)]
)
def test_meshes_keep_the_other_axes_of_the_base(learner):
  problem, base = question(), guess_number_moe.get_config()
  split = dataclasses.replace(
    base,
    placement=placement.Placement(learner=learner),
  )
  two = next(c for c in problem.choices() if c.devices == 2)
  mesh = plan_config.apply(problem, two, split).placement.learner
  assert mesh == dataclasses.replace(learner, first_device=0)
  one = next(c for c in problem.choices() if c.devices == 1)
  assert "1 devices are not divided by" in str(
    plan_config.misfit(problem, one, split)
  )


@pytest.mark.compiled
def test_choices_that_exceed_the_memory_of_a_device_are_refused(
  capsys, tmp_path, fleet_file
):
  base = tmp_path / "base.py"
  base.write_text(TIGHT)
  said = refused(capsys, f"--config={fleet_file}", f"--base={base}")
  assert re.search(r"none of \d+ choices fits, .* because the run takes", said)
  # A tenth of the 1e-4 GiB is kept free.
  assert "where 94.4 KiB can be used; lower batch.rows" in said


def test_a_plan_says_what_it_is_worth_and_what_was_not_met():
  problem = planned_fleets.question(
    goal=problem_lib.Goal(max_step_s=0.1), max_simulations=1
  )
  found = search.best_of(problem, *search.candidates(problem))
  stream = io.StringIO()
  plan.show(found, problem, stream)
  head, *rows = stream.getvalue().splitlines()
  assert head.startswith("devices that train | engines")
  assert rows[0].startswith(found.best.choice.split)
  text = stream.getvalue()
  assert "simulated 1 of" in text
  assert "stopped there, at max_simulations=1" in text
  assert "goal not met: max_step_s=0.1" in text


def test_where_nothing_is_trained_an_id_has_no_price():
  lost = dataclasses.replace(planned_fleets.GUESSES, reward_fault=1.0)
  problem = dataclasses.replace(
    question(),
    workloads=(lost,),
    goal=problem_lib.Goal(minimise="cost_per_token"),
    space=problem_lib.Space(schedules=("sync",)),
    rounds=1,
    max_simulations=1,
  )
  found = search.best_of(problem, *search.candidates(problem))
  assert found.best.key == (0.0, math.inf)
  stream = io.StringIO()
  plan.show(found, problem, stream)
  assert re.search(r" - +0\.0%  ", stream.getvalue())


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    (
      [f"--config={BASE}"],
      "must give an rl.planning.problem.Planning, not Exp",
    ),
    (
      ["--config=configs/fleet_small.py", "--out=x.py"],
      "--out=x.py without --base",
    ),
    (
      ["--config=configs/fleet_small.py", "--kind=compute"],
      "--kind=compute without --calibrate",
    ),
    (
      ["--config=configs/fleet_small.py", f"--base={BASE}"],
      "max_tokens=16000: the base has others; plan with "
      "--config.rollout.max_turns=8 --config.rollout.turn_tokens=2 ",
    ),
    (
      ["--config=configs/fleet_small.py", "--calibrate=nowhere"],
      "--kind=None must be a kind of the fleet",
    ),
    (
      ["--config=configs/fleet_small.py", "--config.goal.minimise=tokens"],
      "goal.minimise=tokens is unknown",
    ),
    (
      [
        "--config=configs/fleet_small.py",
        "--config.rollout.max_tokens=90",
        "--config.rollout.turn_tokens=50",
        # So that there is little to find that out with.
        "--config.rounds=1",
        "--config.groups_per_round=4",
        "--config.space.max_staleness=1",
      ],
      "or no prompt leaves room in rollout.max_tokens=90",
    ),
    (
      ["--config=configs/fleet_small.py", "--config.workloads.0.name=a/b"],
      "--config.workloads.0.name=a/b: name='a/b' is empty or has a slash",
    ),
  ],
)
def test_what_cannot_be_planned_ends_with_one_line(capsys, arguments, words):
  assert words in refused(capsys, *arguments)


@pytest.mark.parametrize(
  ("out", "words"),
  [
    ("fleet.py/best.py", "fleet.py is a file"),
    ("fleet.py/deep/best.py", "cannot be written: Not a directory"),
    ("best.txt", "best.txt: expected a .py file"),
    (".py", "expected a .py file"),
  ],
)
def test_a_plan_that_could_not_be_written_is_not_searched(
  capsys, fleet_file, out, words
):
  path = fleet_file.parent / out
  said = refused(
    capsys, f"--config={fleet_file}", f"--base={BASE}", f"--out={path}"
  )
  assert said.startswith(f"error: --out={path}")
  assert words in said


def test_the_example_can_be_planned():
  problem = fleet_small.get_config()
  choices, refused = search.fitting(problem)
  assert len(choices) > 100
  assert not refused
