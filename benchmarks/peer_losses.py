"""Losses and advantages of TRL, verl and google-tunix on one small batch.

  <python with trl, verl or google-tunix> benchmarks/peer_losses.py trl

calls the code of that project, of the version that is installed, and keeps its
numbers in benchmarks/results/peer_losses.json: for every setting the loss and
its gradient by the log-probability of each token. Imports nothing of this
project, so that it runs in an environment of its own;
tests/claims/test_peer_losses.py holds ours to the numbers.

Letters: B members of two groups of four, T tokens.
"""
# pyright: reportMissingImports=false

import importlib.metadata
import json
import pathlib
import sys
import tempfile
import types
from typing import Any
from unittest import mock

import numpy as np

_RESULTS = pathlib.Path(__file__).parent / "results" / "peer_losses.json"
_GROUP = 4
_LENGTHS = (6, 1, 3, 4, 2, 6, 5, 1)
_REWARDS = (1.0, 0.0, 0.25, 0.5, 0.0, 0.0, 1.0, 0.125)
_BETA = 0.04
_LONGEST = 8
"""Tokens that an answer may have; none of the batch has as many."""


def batch() -> dict[str, Any]:
  """Returns the batch as lists.

  Ratios of policy and old lie on both sides of every bound.
  """
  draw = np.random.default_rng(0)
  shape = len(_LENGTHS), max(_LENGTHS)
  old = -draw.exponential(1.0, shape) - 1.6
  now = old + draw.normal(scale=0.6, size=shape)
  # Bad tokens that have become far more likely: only a dual clip stops them.
  now[[1, 5], [0, 2]] = old[[1, 5], [0, 2]] + 1.5
  columns = {
    "logprobs": now,
    "old": old,
    "behaviour": old + draw.normal(scale=0.5, size=shape),
    "reference": old + draw.normal(scale=0.5, size=shape),
  }
  rounded = {name: x.round(3).tolist() for name, x in columns.items()}
  mask = np.arange(shape[1]) < np.array(_LENGTHS)[:, None]
  return {
    **rounded,
    "mask": mask.tolist(),
    "rewards": list(_REWARDS),
    "group": _GROUP,
    "longest": _LONGEST,
  }


def of_trl() -> dict[str, Any]:
  """Returns what `GRPOTrainer` makes of the batch, for each `loss_type`."""
  import torch
  import transformers
  from datasets import Dataset
  from trl import GRPOConfig, GRPOTrainer
  from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

  given = batch()
  old, reference = (torch.tensor(given[k]) for k in ("old", "reference"))
  mask = torch.tensor(given["mask"]).long()
  ids = torch.where(mask > 0, 5, 0)
  tiny = str(pathlib.Path(__file__).parents[1] / "models" / "hf" / "tiny")
  tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
  # A trainer with a reference loads it from a directory.
  place = tempfile.mkdtemp()
  transformers.AutoModelForCausalLM.from_config(
    transformers.AutoConfig.from_pretrained(tiny)
  ).save_pretrained(place)

  def trainer(kind=GRPOTrainer, config=GRPOConfig, **settings):
    return kind(
      model=place,
      processing_class=tokenizer,
      reward_funcs=lambda completions, **_: list(_REWARDS),
      train_dataset=Dataset.from_list([{"prompt": "a"}] * 8),
      args=config(
        output_dir=place,
        per_device_train_batch_size=len(_LENGTHS),
        num_generations=_GROUP,
        max_completion_length=_LONGEST,
        bf16=False,
        use_cpu=True,
        report_to=[],
        router_aux_loss_coef=0.0,
        **settings,
      ),
    )

  def advantages(**settings):
    one = trainer(**settings)
    answers = [[5] * n for n in _LENGTHS]
    texts = ["a"] * len(answers)
    made = [[6]] * len(answers), answers, None, texts, None, {}, None, None
    one._generate = lambda prompts: made
    found = one._generate_and_score_completions(
      [{"prompt": "a"}] * len(answers)
    )
    return found["advantages"]

  scaled = advantages()

  def loss(**settings):
    one = trainer(**settings)
    one.current_gradient_accumulation_steps = 1
    one.model.train()
    logprobs = torch.tensor(given["logprobs"], requires_grad=True)
    one._get_per_token_logps_and_entropies = lambda *args, **_: (
      logprobs,
      torch.zeros_like(logprobs),
      None,
    )
    inputs = {
      "prompt_ids": torch.full((len(ids), 1), 6),
      "prompt_mask": torch.ones((len(ids), 1), dtype=torch.long),
      "completion_ids": ids,
      "completion_mask": mask,
      "advantages": scaled,
      "old_per_token_logps": old,
      "ref_per_token_logps": reference,
      "num_items_in_batch": mask.sum(),
    }
    value = one._compute_loss(one.model, inputs)
    value.backward()
    return _kept(value, logprobs.grad)

  kinds = "grpo", "bnpo", "dr_grpo", "dapo", "sapo", "vespo"
  return {
    "advantages": {
      "group": scaled.tolist(),
      "none": advantages(scale_rewards="none").tolist(),
    },
    "losses": {
      **{kind: loss(loss_type=kind) for kind in kinds},
      "cispo": loss(loss_type="cispo", epsilon_high=5.0),
      "epsilon_high": loss(epsilon_high=0.28),
      "delta": loss(delta=3.0),
      "beta": loss(beta=_BETA),
      "not use_bias_correction_kl": loss(
        beta=_BETA, use_bias_correction_kl=False
      ),
      "sequence": loss(
        loss_type="grpo",
        importance_sampling_level="sequence",
        epsilon=3e-4,
        epsilon_high=4e-4,
      ),
      "luspo": loss(
        loss_type="luspo",
        importance_sampling_level="sequence",
        epsilon=3e-4,
        epsilon_high=4e-4,
      ),
      "gmpo": loss(
        kind=GMPOTrainer, config=GMPOConfig, epsilon=0.4, epsilon_high=0.3
      ),
    },
  }


def of_verl() -> dict[str, Any]:
  """Returns what `core_algos` makes of the batch, for its losses and modes."""
  import torch
  from verl.trainer.ppo import core_algos
  from verl.workers.config import ActorConfig, PolicyLossConfig

  given = batch()
  mask = torch.tensor(given["mask"]).float()
  old, behaviour, reference = (
    torch.tensor(given[name]) for name in ("old", "behaviour", "reference")
  )
  scores = torch.zeros_like(mask)
  scores[:, 0] = torch.tensor(_REWARDS)
  index = np.repeat(np.arange(len(_REWARDS) // _GROUP), _GROUP)

  def advantages(**settings):
    found, _ = core_algos.compute_grpo_outcome_advantage(
      scores, mask, index, **settings
    )
    return found

  scaled = advantages()

  def config(**settings):
    return ActorConfig(
      strategy="fsdp", rollout_n=_GROUP, ppo_micro_batch_size_per_gpu=8,
      **settings,
    )  # fmt: skip

  def loss(mode, kind="vanilla", kl=None, weights=None, **settings):
    logprobs = torch.tensor(given["logprobs"], requires_grad=True)
    value, _ = core_algos.get_policy_loss_fn(kind)(
      old_log_prob=old,
      log_prob=logprobs,
      advantages=scaled,
      response_mask=mask,
      loss_agg_mode=mode,
      config=config(**settings),
      rollout_is_weights=weights,
    )
    if kl is not None:
      tokens = core_algos.kl_penalty(logprobs, reference, kl)
      more = core_algos.agg_loss(tokens, mask, loss_agg_mode=mode)
      value = value + _BETA * more
    value.backward()
    return _kept(value, logprobs.grad)

  modes = "token-mean", "seq-mean-token-mean", "seq-mean-token-sum"
  low, high = 3e-4, 4e-4
  truncated = torch.exp(old - behaviour).clamp(max=2.0)
  return {
    "advantages": {
      "norm_adv_by_std_in_grpo": scaled[:, 0].tolist(),
      "not": advantages(norm_adv_by_std_in_grpo=False)[:, 0].tolist(),
      "rloo": core_algos.compute_rloo_outcome_advantage(scores, mask, index)[0][
        :, 0
      ].tolist(),
    },
    "losses": {
      **{mode: loss(mode) for mode in modes},
      "seq-mean-token-sum-norm": loss("seq-mean-token-sum-norm"),
      "clip_ratio_high": loss("token-mean", clip_ratio_high=0.28),
      "low_var_kl": loss("token-mean", kl="low_var_kl"),
      "k3+": loss("token-mean", kl="k3+"),
      "rollout_is": loss("token-mean", weights=truncated),
      "gspo": loss(
        "seq-mean-token-mean", "gspo", clip_ratio_low=low, clip_ratio_high=high
      ),
      "geo_mean": loss(
        "seq-mean-token-mean",
        "geo_mean",
        clip_ratio_low=0.4,
        clip_ratio_high=0.3,
      ),
      "gpg": loss("token-mean", "gpg"),
      # As many as there are between the bounds, so that chance has no say.
      "clip_cov": loss(
        "token-mean",
        "clip_cov",
        policy_loss=PolicyLossConfig(
          clip_cov_ratio=1.0, clip_cov_lb=0.3, clip_cov_ub=1.0
        ),
      ),
      "kl_cov": loss(
        "token-mean",
        "kl_cov",
        policy_loss=PolicyLossConfig(kl_cov_ratio=0.25, ppo_kl_coef=0.1),
      ),
      "cispo": loss(
        "token-mean", "cispo", clip_ratio_low=0.2, clip_ratio_high=0.28
      ),
    },
  }


def of_tunix() -> dict[str, Any]:
  """Returns what `algo_core` makes of the batch, for each `loss_agg_mode`."""
  import jax
  import jax.numpy as jnp
  from flax import nnx
  from tunix.rl import algo_core, common, function_registry
  from tunix.rl.grpo import grpo_learner

  given = {k: jnp.asarray(v) for k, v in batch().items()}
  rewards = np.asarray(_REWARDS)

  def advantages(name):
    estimator = function_registry.get_advantage_estimator(name)
    return jnp.asarray(estimator(rewards=rewards, num_generations=_GROUP))

  scaled = advantages("grpo")

  def loss(**settings):
    bound = settings.pop("epsilon_high", None)
    setting = grpo_learner.GRPOConfig(
      num_generations=_GROUP, **({"beta": 0.0} | settings)
    )
    setting.temperature = 1.0
    if bound is not None:
      setting = types.SimpleNamespace(**vars(setting), epsilon_high=bound)
    example = common.TrainExample(
      prompt_ids=jnp.full((len(rewards), 1), 6),
      prompt_mask=jnp.ones((len(rewards), 1)),
      completion_ids=jnp.where(given["mask"], 5, 0),
      completion_mask=given["mask"].astype(jnp.int32),
      advantages=scaled,
      ref_per_token_logps=given["reference"],
      old_per_token_logps=given["old"],
    )

    def value(logprobs):
      scored = logprobs, jnp.zeros((*logprobs.shape, 2))
      with mock.patch.object(
        common, "compute_per_token_logps", return_value=scored
      ):
        return algo_core.grpo_loss_fn(
          nnx.Module(), example, setting, pad_id=0, eos_id=2
        )[0]

    return _kept(*jax.value_and_grad(value)(given["logprobs"]))

  modes = (
    *("token-mean", "sequence-mean-token-mean", "sequence-mean-token-scale"),
    *("seq-mean-token-sum", "sequence-mean-token-sum-norm"),
  )
  return {
    "advantages": {
      name: advantages(name).tolist() for name in ("grpo", "rloo", "drgrpo")
    },
    "losses": {
      **{mode: loss(loss_agg_mode=mode) for mode in modes},
      "gspo-token": loss(loss_algo="gspo-token"),
      **{
        kind: loss(beta=_BETA, kl_loss_mode=kind)
        for kind in ("kl", "mse_kl", "low_var_kl")
      },
    },
  }


def _kept(loss: Any, gradient: Any) -> dict[str, Any]:
  rounded = np.asarray(gradient, np.float64).round(7)
  return {"loss": round(float(loss), 7), "gradient": rounded.tolist()}


def main() -> None:
  """Adds one project's numbers to the file."""
  name = sys.argv[1]
  package, run = {
    "trl": ("trl", of_trl),
    "verl": ("verl", of_verl),
    "tunix": ("google-tunix", of_tunix),
  }[name]
  kept = json.loads(_RESULTS.read_text()) if _RESULTS.exists() else {}
  kept |= {
    "batch": batch(),
    "beta": _BETA,
    name: {"version": importlib.metadata.version(package), **run()},
  }
  _RESULTS.write_text(json.dumps(kept) + "\n")


if __name__ == "__main__":
  main()
