"""Cross a frozen lake on a map never seen before: FrozenLake 4x4, 10 moves.

python -m launch.train --config=configs/frozen_lake_moe.py --workdir=DIR

Hardware: two CPU cores, one virtual device for each mesh. Duration: about three
minutes. Expected: success on unseen maps from about 0.3 after the warm start to
0.8 or more; the oracle of the warm start always wins.
"""

from envs.rewards import rewards
from envs.suites import gymnasium
from models import config as model_config
from rl import experiment
from rl.algorithms import losses, presets
from rl.engine.builtin import settings as engine_settings
from rl.loop import warm_start
from rl.rollout import group_rollout
from rl.schedule import overlap
from rl.train import optimizers


def get_config() -> experiment.Experiment:
  """Returns a run of a few minutes on two cores."""
  return experiment.Experiment(
    environment=gymnasium.FrozenLake(size=4, turns=10),
    reward=rewards.Outcome(),
    model=model_config.tiny_moe(vocab_size=23, max_length=66),
    rollout=group_rollout.Rollout(
      group_size=8, max_turns=10, turn_tokens=2, max_tokens=66
    ),
    engine=engine_settings.EngineSettings(
      slots=256,
      row_buckets=(32, 128),
      chunk_buckets=(4, 20),
      steps_per_dispatch=2,
      compile_ahead=True,
    ),
    overlap=overlap.in_flight(
      groups_per_round=16, max_staleness=1, groups_per_microbatch=8
    ),
    algorithm=presets.Grpo(loss=losses.ClippedSurrogate(), entropy_bonus=0.003),
    optimizer=optimizers.AdamW(learning_rate=2e-4),
    batch=experiment.BatchShape(rows=16, length=132, tail_rows=4),
    warm_start=warm_start.WarmStart(steps=100, episodes=64, exploration=0.4),
    evaluation=experiment.Evaluation(every=20, episodes=400),
    rounds=160,
  )
