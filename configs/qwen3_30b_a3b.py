"""Qwen3-30B-A3B on 64 accelerators: formulas and scales, two tasks in one run.

python -m launch.train --config=configs/qwen3_30b_a3b.py:v5p \\
    --config.initial=models/Qwen3-30B-A3B --workdir=DIR
python -m launch.train --config=configs/qwen3_30b_a3b.py:h200-lora --explain

`v5p` trains on 32 TPUs of 88 GiB and decodes on 32; `h200` trains on 16 GPUs of
139 GiB and decodes on 48, as one holds more of the model. Experts are split in
training, heads in decoding, where every engine has four devices. Training uses
the experts that the engine chose (router replay), and sequence ratios (GSPO),
which are kinder to routers.

Hardware: 64 accelerators; planned, not run. Duration: not measured. Expected:
not measured.
"""

import dataclasses

from configs import qwen3_0_6b, qwen3_4b
from envs import mixture
from models import config as model_config
from models import sharding
from rl import experiment
from rl.algorithms import presets
from rl.engine.builtin import settings as engine_settings
from rl.pools import placement

LENGTH = 16_384
_DEVICES = {
  "v5p": placement.Placement(
    learner=placement.MeshSpec(data=4, expert=8),
    decode=placement.MeshSpec(tensor=4, rules=sharding.DECODE),
    replicas=8,
    platform="tpu",
    device_gib=88.0,
  ),
  "h200": placement.Placement(
    learner=placement.MeshSpec(data=2, expert=8),
    decode=placement.MeshSpec(tensor=4, rules=sharding.DECODE),
    replicas=12,
    platform="gpu",
    device_gib=139.0,
  ),
}


def get_config(devices: str = "v5p") -> experiment.Experiment:
  """Returns the run.

  Args:
    devices: "v5p" or "h200"; with "-lora" behind it adapters are all that
      trains.
  """
  kind, _, trained = devices.partition("-")
  if kind not in _DEVICES:
    raise ValueError(f"{devices!r} does not begin with v5p or h200")
  base = qwen3_4b.get_config()
  return qwen3_0_6b.trains(
    trained or "all",
    dataclasses.replace(
      base,
      environment=mixture.Mixture(
        (mixture.Part(qwen3_0_6b.COUNTDOWN), mixture.Part(qwen3_4b.SCALES))
      ),
      model=model_config.qwen3_moe(
        "30b-a3b",
        max_length=LENGTH,
      ),
      initial="models/Qwen3-30B-A3B",
      rollout=dataclasses.replace(
        base.rollout,
        turn_tokens=8192,
        max_tokens=LENGTH,
        record_experts=True,
      ),
      engine=engine_settings.EngineSettings(record_experts=True),
      algorithm=presets.Gspo(),
      batch=experiment.BatchShape(rows=32, length=LENGTH),
      placement=_DEVICES[kind],
    ),
  )
