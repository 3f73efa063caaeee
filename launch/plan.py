"""Plans a run: the devices that train, those that decode, and the schedule.

  python -m launch.plan --config=configs/fleet_small.py
  python -m launch.plan --config=FILE --config.goal.max_lag=1
  python -m launch.plan --config=FILE --base=configs/X.py --out=Y.py
  python -m launch.plan --config=FILE --calibrate=RUN_DIRECTORY

FILE has a get_config() that returns a `problem.Planning`. With --base and
--out the plan becomes a config for `launch.train`: the base with the schedule,
placement and routing of the best choice. With --calibrate speeds and tasks are
those of an earlier run. Nothing touches a device.
"""

import dataclasses
import itertools
import os
import pathlib
import sys
import textwrap
from collections.abc import Iterator
from typing import TextIO

from absl import app
from absl import flags as absl_flags

from launch.cli import flags, steps, workdir
from rl import assemble, experiment, memory_plan
from rl.planning import calibration, plan_config, search
from rl.planning import problem as problem_lib
from rl.pools import placement
from rl.runtime import log_line
from rl.settings import overrides
from twinmesh import error_codes

_BASE = absl_flags.DEFINE_string(
  "base", None, "Config of the run that is planned."
)
_OUT = absl_flags.DEFINE_string(
  "out", None, "Python file for the planned config; needs --base."
)
_CALIBRATE = absl_flags.DEFINE_string(
  "calibrate", None, "Directory of a run whose speeds the plan should use."
)
_KIND = absl_flags.DEFINE_string(
  "kind", None, "Kind of the fleet's devices that the run of --calibrate used."
)
absl_flags.adopt_module_key_flags(flags)
_SHOWN = 8


@flags.command
def main() -> None:
  """Loads the problem, solves it, prints and writes the plan."""
  with flags.exit_on_setting_error():
    problem = flags.load_from_command_line(check)
    if _CALIBRATE.value is not None:
      run_dir = pathlib.Path(_CALIBRATE.value)
      problem = calibration.apply(problem, run_dir, _KIND.value)
    base = _load_base(problem)
  with steps.Steps(sys.stderr) as shown:
    shown.phase("bounding the step of every choice")
    with flags.exit_on_setting_error():
      waiting, refused = search.candidates(problem, _fits(problem, base))

    def estimated(
      problem: problem_lib.Planning, candidate: search.Candidate
    ) -> search.ChoiceEstimate:
      shown.phase(f"simulating {_name(candidate.choice)}")
      found = search.estimate(problem, candidate)
      step = f"{_short(found.result.step_s)} s a step"
      log_line.tell(f"simulated {_name(candidate.choice)}: {step}")
      return found

    plan = search.best_of(problem, waiting, refused, estimated)
  show(plan, problem, sys.stdout)
  if base is not None and _OUT.value is not None:
    write(plan, problem, base, _BASE.value or "", pathlib.Path(_OUT.value))
  if not plan.met:
    unmet = "the goal is not met; the first line of the table is the nearest"
    error_codes.fail(unmet, "TM-S10", status=1)


check = flags.instance_of(problem_lib.Planning, "configs/fleet_small.py")


def _load_base(problem: problem_lib.Planning) -> experiment.Experiment | None:
  if _KIND.value is not None and _CALIBRATE.value is None:
    raise overrides.SettingError(
      f"--kind={_KIND.value} without --calibrate: name the run whose devices "
      "are of this kind"
    )
  if _BASE.value is None:
    if _OUT.value is not None:
      raise overrides.SettingError(
        f"--out={_OUT.value} without --base: name the config that the plan is "
        "for, as in --base=configs/guess_number_moe.py"
      )
    return None
  base = flags.load(_BASE.value, check=experiment.check_experiment)
  plan_config.check_base(problem, base)
  if _OUT.value is not None:
    _check_out(pathlib.Path(_OUT.value), _BASE.value)
  return base


def _check_out(out: pathlib.Path, base_path: str) -> None:
  if out.suffix != ".py" or out.is_dir():
    raise overrides.SettingError(f"--out={out}: expected a .py file")
  given = [
    flags.split(path)[0] for path in (base_path, absl_flags.FLAGS.config)
  ]
  if out.exists() and any(out.samefile(file) for file in given):
    raise overrides.SettingError(
      f"--out={out} would replace a file that the plan is made of; name another"
    )
  workdir.make_writable(out.parent, f"--out={out}")


def _fits(
  problem: problem_lib.Planning, base: experiment.Experiment | None
) -> search.Fits:
  """Returns the check of whether the base can run a choice.

  The memory of a device counts where the base states it: those of the fleet
  are not here.
  """
  if base is None:
    return lambda choice: None
  base = base.with_auto_dtype(base.placement.dtype())

  known: dict[str, str | None] = {}

  def excess(place: placement.Placement, max_staleness: int) -> str | None:
    schedule = dataclasses.replace(base.overlap, max_staleness=max_staleness)
    run = dataclasses.replace(base, placement=place, overlap=schedule)
    programs = assemble.learner_programs(run, place.learner.plan)
    try:
      memory_plan.fit(run, programs, place.memory())
    except ValueError as error:
      # Without the shares of learner and engines, which have a line each.
      first, *shares_and_out = str(error).splitlines()
      return "; ".join((first.removesuffix(":"), *shares_and_out[-1:]))
    return None

  def misfit(choice: problem_lib.FleetChoice) -> str | None:
    reason = plan_config.misfit(problem, choice, base)
    if reason or base.placement.device_gib is None:
      return reason
    place = plan_config.apply(problem, choice, base).placement
    bound = choice.overlap.max_staleness
    key = f"{place} {bound}"  # A backend with resources has no hash.
    if key not in known:
      known[key] = excess(place, bound)
    return known[key]

  return misfit


def _name(choice: problem_lib.FleetChoice) -> str:
  return f"{choice.split}, {choice.schedule}"


def show(
  plan: search.FleetPlan, problem: problem_lib.Planning, stream: TextIO
) -> None:
  """Prints the best choices as a table, and a summary of the first."""
  rows = [_HEAD, *(_row(one) for one in plan.estimates[:_SHOWN])]
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  for row in rows:
    first, second, *numbers = (
      cell.rjust(width) if i > 1 else cell.ljust(width)
      for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    print("  ".join((first, second, *numbers)).rstrip(), file=stream)
  print(file=stream)
  for line in summary(plan, problem):
    print(line, file=stream)


_HEAD = (
  "devices that train | engines",
  "schedule",
  "step",
  "bound",
  "T*/T",
  "lag",
  "max",
  "cost",
  "per 1k ids",
  "useful",
  "bound by",
)


def _row(one: search.ChoiceEstimate) -> tuple[str, ...]:
  return (
    one.choice.split,
    one.choice.schedule,
    _short(one.result.step_s) + " s",
    _short(one.bound.step_s) + " s",
    f"{one.result.efficiency:.0%}",
    f"{one.lag_mean:.2f}",
    str(one.lag_max),
    _short(one.cost),
    _short(1000.0 * one.cost / one.tokens) if one.tokens else "-",
    f"{one.result.useful:.1%}",
    f"{one.bound_by} {one.share:.0%}",
  )


def _short(number: float) -> str:
  """Returns three digits, or all digits before the point if there are more."""
  return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def summary(
  plan: search.FleetPlan, problem: problem_lib.Planning
) -> Iterator[str]:
  """Yields the best choice, its result, and the extent of the search."""
  best = plan.best
  yield f"plan: {_name(best.choice)}"
  yield (
    f"a step takes {_short(best.result.step_s)} s and costs "
    f"{_short(best.cost)}; {best.share:.0%} of it goes to the "
    f"{best.bound_by}; no step of these devices takes less than "
    f"{_short(best.bound.step_s)} s"
  )
  number = len(plan.estimates)
  if plan.complete:
    yield (
      f"simulated {number} of {plan.choices} choices; the bound of no other "
      f"one is better by more than {problem.tolerance:.0%}"
    )
  else:
    yield (
      f"simulated {number} of {plan.choices} choices and stopped there, at "
      f"max_simulations={problem.max_simulations}: others may be better"
    )
  if plan.refused:
    reason = max(plan.refused, key=lambda why: plan.refused[why])
    count = sum(plan.refused.values())
    yield f"{count} more do not fit the base, such as: {reason}"
  if not plan.met:
    goal = problem.goal
    yield (
      f"goal not met: max_step_s={goal.max_step_s:g}, max_cost="
      f"{goal.max_cost:g}, max_mean_lag={goal.max_mean_lag:g}, max_faults="
      f"{goal.max_faults:g}; the nearest takes {_short(best.result.step_s)} s, "
      f"costs {_short(best.cost)}, has a mean lag of {best.lag_mean:.2f} and "
      f"faults in {best.result.fault_share:.1%} of its episodes"
    )


def write(
  plan: search.FleetPlan,
  problem: problem_lib.Planning,
  base: experiment.Experiment,
  base_path: str,
  out: pathlib.Path,
) -> None:
  """Writes a config of the best choice, and checks it as a run would.

  Args:
    base_path: of the base; the file holds it relative to its own place. One
      below configs/ may be that of the package.
    out: in an existing directory.
  """
  lines = [textwrap.wrap(text, 78) for text in summary(plan, problem)]
  # The first line names the choice, as the title of the file does.
  text_below = "\n".join(itertools.chain(*lines[1:]))
  file, argument = flags.split(base_path)
  relative = os.path.relpath(file.resolve(), out.parent.resolve())
  text = plan_config.source(
    problem,
    plan.best.choice,
    base,
    name=str(out),
    base_path=relative if argument is None else f"{relative}:{argument}",
    summary=text_below,
  )
  out.write_text(text)
  flags.load(str(out), check=experiment.check_experiment)
  print(f"{out}: python -m launch.train --config={out} --workdir=DIR")


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
