"""Evaluates a run: python -m launch.evaluate --run=DIR [--episodes=N].

--config.rollout.turn_tokens=512 and the like change settings of the run for
this evaluation alone.
"""

import asyncio
import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Callable

from absl import app
from absl import flags as absl_flags

from launch.cli import flags, known_programs, steps, workdir
from launch.report import frozen
from launch.run import blocked_loop, load_run
from rl import experiment as experiment_lib
from rl.rollout import evaluate, grading
from twinmesh import error_codes

_RUN = absl_flags.DEFINE_string(
  "run", None, "Directory of a run.", required=True
)
_EPISODES = absl_flags.DEFINE_integer(
  "episodes",
  500,
  "Held-out tasks to play, one episode each. Of fewer rows each comes again,"
  " and the interval is then too narrow for other rows.",
  lower_bound=1,
)
_TEMPERATURE = absl_flags.DEFINE_float(
  "temperature", None, "Sampling temperature; 0 is greedy. Default: the run's."
)
absl_flags.adopt_module_key_flags(known_programs)


@flags.command
def main() -> None:
  """Plays held-out tasks; prints the success rate with its interval.

  The exit code is 1 if no episode could be graded.
  """
  with flags.exit_on_setting_error():
    flags.override("evaluation.episodes", f"{_EPISODES.value}", "episodes")
    if (temperature := _TEMPERATURE.value) is not None:
      flags.override("evaluation.temperature", f"{temperature}", "temperature")
    experiment = workdir.read_trained(_RUN.value)
    experiment = flags.apply(experiment, flags.overrides_of_run())
    load_run.prepare(experiment, _RUN.value)
  run_dir = pathlib.Path(_RUN.value)
  with steps.Steps(sys.stderr) as shown:
    step, outcome = asyncio.run(_evaluate(experiment, run_dir, shown.phase))
  found = (
    f"success {outcome.success:.1%} [{outcome.low:.1%}, {outcome.high:.1%}] "
    f"(95 % Wilson) on {outcome.episodes} held-out episodes, mean reward "
    f"{outcome.reward:.3f}"
  )
  if not outcome.episodes:
    found = "no episode could be graded"
  print(
    f"{experiment.environment.name} after {step} rounds: {found}, "
    f"{outcome.faults} faults"
    + (f", most of them {outcome.fault}" if outcome.fault else "")
  )
  row = {"round": step, **dataclasses.asdict(outcome)}
  print(json.dumps(frozen.finite(row)))
  sys.exit(0 if outcome.episodes else 1)


async def _evaluate(
  experiment: experiment_lib.Experiment,
  run_dir: pathlib.Path,
  report: Callable[[str], None],
) -> tuple[int, evaluate.EvaluationResult]:
  """Returns the rounds that trained the run, and how well it plays."""
  report("loading the weights")
  async with load_run.restored(experiment, run_dir) as (parts, found):
    try:
      await parts.player.graders.open()
    except grading.RewardUnreachable as error:
      error_codes.fail(error, status=1)
    await parts.start(found.state, found.step, report)
    settings, end_s = experiment.evaluation, experiment.progress_timeout_s
    tell = functools.partial(print, file=sys.stderr, flush=True)
    with blocked_loop.guard(parts.watchdog, end_s, tell):
      outcome, _ = await parts.watchdog.wait(
        evaluate.evaluate(
          parts.player,
          episodes=settings.episodes,
          temperature=settings.temperature,
          success=settings.success,
          seed=experiment.seed,
          report=report,
        ),
        owner="the run",
        what="the evaluation",
        deadline_s=end_s,
        renew_on_heartbeat=True,
      )
  return found.step, outcome


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
