"""Sums for verl: writes runs/sums.parquet, and grades answers to it."""

import json


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
  """Returns 0.2 for a digit to begin with, and 0.8 more for the sum."""
  right = solution_str.strip() == ground_truth
  return 0.2 * solution_str[:1].isdigit() + 0.8 * right


def asked(row):
  """Returns a row as verl takes it."""
  return {
    "data_source": "sums",
    "prompt": [{"role": "user", "content": row["question"]}],
    "reward_model": {"style": "rule", "ground_truth": row["answer"]},
  }


if __name__ == "__main__":
  import pandas

  with open("configs/sums.jsonl") as file:
    rows = [asked(json.loads(line)) for line in file]
  pandas.DataFrame(rows).to_parquet("runs/sums.parquet")
