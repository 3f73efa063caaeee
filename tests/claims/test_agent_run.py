"""A run whose episodes are processes that use the `openai` package."""

import json

import pytest

from rl.data import trajectory
from tests.helpers import commands

pytestmark = [pytest.mark.compiled, pytest.mark.slow]

CHANGES = {
  **commands.TINY,
  "rounds": "2",
  "rollout.group_size": "2",
  "overlap.groups_per_round": "2",
  "overlap.groups_per_microbatch": "1",
  "batch.tail_rows": "none",
  "evaluation.episodes": "2",
}


def test_a_program_is_trained_token_for_token(tmp_path):
  command = commands.train(
    tmp_path / "run", CHANGES, config="configs/agent_letters.py"
  )
  result = commands.launch(*command)
  # 0: every promise of the schedule held, and the ledger has no error.
  assert result.returncode == 0, result.stdout + result.stderr
  (file, *_) = sorted((tmp_path / "run" / "trajectories").glob("*.jsonl"))
  for line in file.read_text().splitlines():
    data = json.loads(line)
    played = trajectory.trajectory_from_json(data)
    assert played.fault == ""
    assert played.reward in (0.0, 1.0)
    # A letter, and the id before an answer; then the one id of the answer.
    assert played.sampled.tolist() == [False, False, True]
    ((asked, answer),) = [
      (turn["context_words"][0], turn["words"][0]) for turn in data["turns"]
    ]
    assert played.reward == (asked + answer in ("ab", "bc", "cd"))
  rows = (tmp_path / "run" / "logprob_gap.jsonl").read_text().splitlines()
  # Engine and learner agree about what was sampled; 1e-5 is typical.
  assert max(json.loads(row)["max"] for row in rows) < 1e-3
