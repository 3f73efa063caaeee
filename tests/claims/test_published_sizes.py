"""The configs of published models: they fit, and run end to end when cut."""

import dataclasses
import json

import jax
import pytest

from configs import qwen3_0_6b, qwen3_4b
from envs import base
from launch.cli import flags
from models import policy as policy_lib
from models.hf import config as hf_config
from models.hf import export
from rl import assemble, memory_plan
from rl.engine.builtin import settings as engine_settings
from tests.helpers import commands

RUNS = ("qwen3_0_6b.py", "qwen3_4b.py", "qwen3_30b_a3b.py:v5p")
OTHERS = (
  "qwen3_0_6b.py:lora",
  "qwen3_4b.py:lora",
  "qwen3_30b_a3b.py:v5p-lora",
  "qwen3_30b_a3b.py:h200",
  "qwen3_30b_a3b.py:h200-lora",
)
# Layers, widths and meshes cut, and nothing else about the model's parts.
CUT = {
  "rounds": "2",
  "model.num_layers": "2",
  "model.d_model": "32",
  "model.num_heads": "4",
  "model.num_kv_heads": "2",
  "model.head_dim": "8",
  "model.d_ff": "32",
  "model.d_expert": "16",
  "model.vocab_size": f"{hf_config.load(hf_config.TINY).vocab_size}",
  "model.max_length": "768",
  "rollout.group_size": "2",
  "rollout.max_turns": "2",
  "rollout.turn_tokens": "8",
  "rollout.max_tokens": "768",
  "engine.slots": "8",
  "engine.row_buckets": "8,",
  "engine.chunk_buckets": "64,",
  "overlap.groups_per_round": "2",
  "overlap.groups_per_microbatch": "1",
  "batch.rows": "4",
  "batch.length": "768",
  "batch.tail_rows": "none",
  "evaluation.episodes": "0",
  "placement.platform": "cpu",
}
CUTS = {
  "qwen3_0_6b.py:lora": {},
  "qwen3_4b.py": {"placement.learner.data": "2", "placement.replicas": "2"},
  "qwen3_30b_a3b.py:h200": {
    "model.num_experts": "8",
    "model.experts_per_token": "2",
    "placement.learner.expert": "2",
    "placement.decode.tensor": "2",
    "placement.replicas": "1",
  },
}


@dataclasses.dataclass(frozen=True)
class ManyLetters:
  """A reward that differs between any two answers of random weights."""

  stateless = True

  async def __call__(self, task, transcripts):
    return [base.Grade(_letters(one), {}) for one in transcripts]


def _letters(transcript):
  said = "".join(
    m.content for m in transcript.messages if m.role == "assistant"
  )
  return sum(map(ord, said)) % 1009 / 1009


@pytest.mark.compiled
@pytest.mark.parametrize(
  "run", [*RUNS, *(pytest.param(x, marks=pytest.mark.slow) for x in OTHERS)]
)
def test_a_published_model_fits_the_devices_that_its_config_names(run):
  experiment = flags.load(str(commands.ROOT / "configs" / run))
  place = experiment.placement
  memory = place.memory()
  assert place.device_gib
  # A tenth of the memory is kept free.
  assert memory.usable == round(place.device_gib * 2**30) * 9 // 10
  programs = assemble.learner_programs(experiment, place.learner.plan)
  fitted = memory_plan.fit(experiment, programs, memory)
  engine = fitted.engine
  assert isinstance(engine, engine_settings.EngineSettings)
  # Enough rows for a step to be worth reading the weights.
  assert engine.slots is not None
  assert engine.slots >= 8
  parts = memory_plan.shares(fitted, programs)
  held = [
    sum(part.total for part in parts if device in part.devices)
    for device in range(place.num_devices)
  ]
  assert max(held) <= memory.usable
  counts = {"qwen3_0": 1, "qwen3_4": 8, "qwen3_3": 64}
  assert len(held) == counts[run[:7]]


@pytest.mark.slow
@pytest.mark.parametrize("name", CUTS)
def test_a_cut_of_it_trains_two_rounds_and_is_exported(name, tmp_path):
  config, source = f"configs/{name}", tmp_path / "source"
  whole = flags.load(str(commands.ROOT / config), CUT | CUTS[name])
  model = dataclasses.replace(whole.model, lora=None)
  params = policy_lib.of(model).init(jax.random.key(0))
  export.export(source, params, model, hf_config.TINY)
  changes = (
    CUT
    | CUTS[name]
    | {
      "initial": str(source),
      "reward": f"{__name__}.ManyLetters()",
    }
  )
  run, out = tmp_path / "run", tmp_path / "out"
  command = commands.train(run, changes, config)
  result = commands.launch(*command)
  if "Exiting to ensure a consistent program state" in result.stderr:
    # XLA on a CPU may start the collectives of a program in another order on
    # each device, waits for 40 s, and aborts. Whoever it happens to goes on.
    result = commands.launch(*command)
  assert result.returncode == 0, result.stdout + result.stderr
  lines = (run / "metrics.jsonl").read_text().splitlines()
  rounds = [json.loads(line) for line in lines]
  assert [row["faults"] for row in rounds] == [0, 0]
  assert max(row["grad_norm"] for row in rounds) > 0
  result = commands.run("launch.export", f"--run={run}", f"--directory={out}")
  assert result.returncode == 0, result.stderr
  left = dataclasses.replace(hf_config.load(out), compute=model.compute)
  assert left == hf_config.load(source, model.compute)


def test_only_a_formula_of_the_numbers_reaches_the_target():
  row = {"numbers": [3, 5, 5, 2], "target": 20}
  for right in ("so\n(3 + 5) * 5 / 2", "$5/2*(5+3)$."):
    assert qwen3_0_6b.grade(right, row) == 1
  for wrong in (
    *("", "20", "3 + 5 + 5 + 2", "5 * (3 + 5) / 2 / 1", "5 * 4", "3 / (5 - 5)"),
    *("__import__('os')", "3 ** 5", "(3 + 5) * 5 / True", "(" * 400, "3 3"),
    *("(3 + 5) * 5 / 2" + " " * 100 + "+ 1", "(3 + 5) * 5 / 2\nis right"),
  ):
    assert qwen3_0_6b.grade(wrong, row) == 0


def test_the_scales_tell_the_heavier_and_pay_for_the_heaviest():
  scales = qwen3_4b.Scales()
  scales.reset(0)
  assert scales.get_reward() == 0
  heaviest = "A"
  for box in qwen3_4b.BOXES[1:]:
    heaviest = scales.weigh(heaviest, box)
  assert scales.choose(heaviest) == f"You chose {heaviest}."
  # The first choice counts.
  scales.choose("A" if heaviest != "A" else "B")
  assert scales.get_reward() == 1
