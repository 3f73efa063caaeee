"""Evaluates a run: python -m launch.evaluate --run=DIR [--episodes=N]."""

import asyncio
import dataclasses
import json
import pathlib
import sys

from absl import app
from absl import flags as absl_flags

from launch.cli import flags, known_programs, workdir
from launch.run import display, load_run
from rl import experiment as experiment_lib
from rl.rollout import evaluate, grading

_RUN = absl_flags.DEFINE_string(
  "run", None, "Directory of a run.", required=True
)
_EPISODES = absl_flags.DEFINE_integer(
  "episodes", 500, "Held-out tasks to play, one episode each.", lower_bound=1
)
_TEMPERATURE = absl_flags.DEFINE_float(
  "temperature", None, "Sampling temperature; 0 is greedy. Default: the run's."
)
absl_flags.adopt_module_key_flags(known_programs)


@flags.command
def main() -> None:
  """Plays held-out tasks; prints the success rate with its interval."""
  with flags.exit_on_setting_error():
    experiment = workdir.read_trained(_RUN.value)
    if _TEMPERATURE.value is not None:
      settings = dataclasses.replace(
        experiment.evaluation, temperature=_TEMPERATURE.value
      )
      experiment = dataclasses.replace(experiment, evaluation=settings)
    load_run.prepare(experiment)
  asyncio.run(_evaluate(experiment, pathlib.Path(_RUN.value)))


async def _evaluate(
  experiment: experiment_lib.Experiment, run_dir: pathlib.Path
) -> None:
  lines = display.Lines(sys.stderr)
  lines.phase("loading the weights")
  async with load_run.restored(experiment, run_dir) as (parts, found):
    try:
      await parts.player.graders.open()
    except grading.RewardUnreachable as error:
      sys.exit(f"error: {error}")
    await parts.start(found.state, found.step, lines.phase)
    settings = experiment.evaluation
    outcome, _ = await parts.watchdog.wait(
      evaluate.evaluate(
        parts.player,
        episodes=_EPISODES.value,
        temperature=settings.temperature,
        success=settings.success,
        seed=experiment.seed,
        report=lines.phase,
      ),
      owner="the run",
      what="the evaluation",
      deadline_s=experiment.progress_timeout_s,
      renew_on_heartbeat=True,
    )
  print(
    f"{experiment.environment.name} after {found.step} rounds: success "
    f"{outcome.success:.1%} [{outcome.low:.1%}, {outcome.high:.1%}] "
    f"(95 % Wilson) on {outcome.episodes} held-out episodes, mean reward "
    f"{outcome.reward:.3f}, {outcome.faults} faults"
    + (f", most of them {outcome.fault}" if outcome.fault else "")
  )
  print(json.dumps({"round": found.step, **dataclasses.asdict(outcome)}))


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
