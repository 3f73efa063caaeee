"""GRPO on sums with Tunix: python docs/migration/sums_tunix.py MODEL."""

import json
import sys

import grain
import jax
import optax
import transformers
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout

place = sys.argv[1]
tokenizer = transformers.AutoTokenizer.from_pretrained(place)
rollout = base_rollout.RolloutConfig(
  max_tokens_to_generate=8,
  max_prompt_length=32,
  kv_cache_size=64,
  temperature=1.0,
  seed=0,
)


def grade(prompts, completions, answer, **_):
  """Returns 0.2 for a digit to begin with, and 0.8 more for the sum."""
  rollout.seed += 1  # Else every step is sampled with the same noise.
  rewards = []
  for text, expected in zip(completions, answer, strict=True):
    right = text.strip() == expected
    rewards.append(0.2 * text[:1].isdigit() + 0.8 * right)
  return rewards


def asked(row):
  """Returns a row as the learner takes it."""
  messages = [{"role": "user", "content": row["question"]}]
  text = tokenizer.apply_chat_template(
    messages, tokenize=False, add_generation_prompt=True
  )
  return {"prompts": text, "answer": row["answer"]}


with open("configs/sums.jsonl") as file:
  rows = [json.loads(line) for line in file]
sizes = transformers.AutoConfig.from_pretrained(place)
config = qwen3.ModelConfig(
  num_layers=sizes.num_hidden_layers,
  vocab_size=sizes.vocab_size,
  embed_dim=sizes.hidden_size,
  hidden_dim=sizes.moe_intermediate_size,
  num_heads=sizes.num_attention_heads,
  head_dim=sizes.head_dim,
  num_kv_heads=sizes.num_key_value_heads,
  rope_theta=sizes.rope_parameters["rope_theta"],
  norm_eps=sizes.rms_norm_eps,
  use_tied_embedding=sizes.tie_word_embeddings,
  num_experts=sizes.num_experts,
  num_experts_per_tok=sizes.num_experts_per_tok,
)
mesh = jax.make_mesh(
  (1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2
)
with mesh:
  cluster = rl_cluster.RLCluster(
    actor=params.create_model_from_safe_tensors(place, config, mesh),
    tokenizer=tokenizer,
    cluster_config=rl_cluster.ClusterConfig(
      role_to_mesh=dict.fromkeys(rl_cluster.Role, mesh),
      training_config=rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.chain(
          optax.clip_by_global_norm(1.0), optax.adam(4e-3, b2=0.99)
        ),
        eval_every_n_steps=1000,
        max_steps=30,
        mini_batch_size=8,
        train_micro_batch_size=8,
      ),
      rollout_config=rollout,
    ),
  )
  cluster.with_external_metrics_logger(print)
  learner = grpo_learner.GRPOLearner(
    rl_cluster=cluster,
    algo_config=grpo_learner.GRPOConfig(
      num_generations=8, beta=0.0, loss_agg_mode="token-mean"
    ),
    reward_fns=grade,
  )
  learner.train(
    grain.MapDataset.source(rows).seed(0).shuffle().repeat().map(asked).batch(8)
  )
