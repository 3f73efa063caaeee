"""GRPO on sums with TRL: python docs/migration/sums_trl.py MODEL."""

import sys

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def grade(completions, answer, **_):
  """Returns 0.2 for a digit to begin with, and 0.8 more for the sum."""
  rewards = []
  for (message,), expected in zip(completions, answer, strict=True):
    text = message["content"]
    right = text.strip() == expected
    rewards.append(0.2 * text[:1].isdigit() + 0.8 * right)
  return rewards


def asked(row):
  """Returns the prompt of a row."""
  return {"prompt": [{"role": "user", "content": row["question"]}]}


rows = load_dataset("json", data_files="configs/sums.jsonl", split="train")
trainer = GRPOTrainer(
  model=sys.argv[1],
  reward_funcs=grade,
  train_dataset=rows.map(asked),
  args=GRPOConfig(
    output_dir="runs/sums-trl",
    num_generations=8,
    per_device_train_batch_size=64,
    max_completion_length=8,
    learning_rate=4e-3,
    lr_scheduler_type="constant",
    adam_beta2=0.99,
    max_steps=30,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    bf16=False,
  ),
)
trainer.train()
