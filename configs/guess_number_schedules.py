"""The run of `guess_number_moe.py` under a schedule, chosen by name.

python -m launch.train --config=configs/guess_number_schedules.py:sync \\
    --workdir=DIR

name            lag  rollout and training
sync              0  one after the other
strict_pipeline   0  gradients are summed while the tail of a round decodes
rollout_pipe      0  two updates per round, the first while its tail decodes
hard_frontier     0  the same, playing only the groups of one update at a time
one_step_off      1  the next round decodes during training; engines drain
bounded           2  the same, within two rounds
in_flight         1  weights arrive within trajectories; caches are recomputed
keep_kv           1  the same; caches are kept
drop              1  in flight, as groups complete; stale groups are replaced
recycle           1  in flight, as groups complete; stale groups are replayed

`python -m benchmarks.overlap` compares them all: how long a round takes, what
share of the sampled tokens is trained, and how well a simulation predicts both.

Hardware: two CPU cores, one virtual device for each mesh. Duration: 5 to 7
minutes for all rounds. Expected: success as in guess_number_moe. In that
benchmark a round is up to 1.3 times as fast as one of sync, and where steps of
the game take time 0.7 (hard_frontier) to 1.9 times (recycle).
"""

import dataclasses

from configs import guess_number_moe
from rl import experiment
from rl.schedule import overlap

_GROUPS = 16
_FLYING = overlap.in_flight(_GROUPS, max_staleness=1)

SCHEDULES = {
  "sync": overlap.sync(_GROUPS),
  "strict_pipeline": overlap.strict_pipeline(_GROUPS),
  "rollout_pipe": overlap.rollout_pipe(_GROUPS, updates_per_round=2),
  "hard_frontier": overlap.rollout_pipe(
    _GROUPS, updates_per_round=2, hard=True
  ),
  "one_step_off": overlap.one_step_off(_GROUPS),
  "bounded": overlap.bounded(_GROUPS, max_staleness=2),
  "in_flight": _FLYING,
  "keep_kv": overlap.in_flight(_GROUPS, on_publish="keep_kv"),
  "drop": dataclasses.replace(_FLYING, consume="drop"),
  "recycle": dataclasses.replace(_FLYING, consume="recycle"),
}


def get_config(schedule: str = "in_flight") -> experiment.Experiment:
  """Returns the run under a schedule.

  Raises:
    ValueError: there is none of that name.
  """
  if schedule not in SCHEDULES:
    raise ValueError(f"{schedule!r}: use " + " or ".join(SCHEDULES))
  return dataclasses.replace(
    guess_number_moe.get_config(), overlap=SCHEDULES[schedule]
  )
