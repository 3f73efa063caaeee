"""Writes samples of trajectories and log-probability gaps as JSON lines."""

import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Float32

from rl.algorithms import reward_shaping
from rl.data import trajectory
from rl.rollout import episode
from rl.runtime import line_file
from rl.train import logprob_gap, trainer

_TOKENS_KEPT = 512
_EPISODES_READ = 64
_NGRAM = 8


def write(
  run_dir: pathlib.Path,
  round_: int,
  groups: Sequence[trajectory.Group],
  advantages: Sequence[Float32[np.ndarray, " G"]],
  by_token: Sequence[Sequence[trainer.TokenUse | None]],
  chat: episode.Chat,
) -> pathlib.Path:
  """Writes every member of `groups` to trajectories/round_NNNNNN.jsonl.

  A line holds `trajectory_to_json`, the advantage, the text of every id, and
  the `gap` between two of them. The turns of a member that was trained have
  `advantages`, a number a token, and `old_logprobs`, if another policy than the
  one that sampled has old ones.
  """
  path = run_dir / "trajectories" / f"round_{round_:06d}.jsonl"
  path.parent.mkdir(exist_ok=True)
  with path.open("w") as file:
    for group, means, uses in zip(groups, advantages, by_token, strict=True):
      for member, mean, use in zip(
        group.trajectories, means, uses, strict=True
      ):
        line = readable(member, chat)
        line["advantage"] = float(mean)
        if use is not None:
          _add(line["turns"], "advantages", use.advantages)
        if use is not None and use.old is not None:
          _add(line["turns"], "old_logprobs", use.old)
        file.write(json.dumps(line) + "\n")
  return path


def keep_newest(run_dir: pathlib.Path, count: int) -> None:
  """Deletes the files of `write` but for the newest."""
  found = (run_dir / "trajectories").glob("round_*.jsonl")
  for path in sorted(found)[:-count]:
    path.unlink(missing_ok=True)


def _add(
  turns: Sequence[dict[str, Any]], name: str, values: Float[np.ndarray, " T"]
) -> None:
  """Adds a number of each sampled token to the turns of a member."""
  start = 0
  for turn in turns:
    end = start + len(turn["tokens"])
    turn[name] = [_finite(x) for x in values[start:end].tolist()]
    start = end


def readable(
  member: trajectory.Trajectory, chat: episode.Chat
) -> dict[str, Any]:
  """Returns a trajectory as JSON data with the text of its ids."""
  data = trajectory.trajectory_to_json(member)
  for turn in data["turns"]:
    turn["context_words"] = [chat.token(i) for i in turn["context"]]
    turn["words"] = [chat.token(i) for i in turn["tokens"]]
  return data | {"gap": chat.gap}


def repetition(groups: Sequence[trajectory.Group]) -> float:
  """Returns the share of 8-grams that occurred before in the same answer.

  The mean over at most 64 episodes, of those with an answer of 8 tokens; nan
  without any.
  """
  members = [member for group in groups for member in group.trajectories]
  every = max(1, math.ceil(len(members) / _EPISODES_READ))
  shares = [
    share
    for member in members[::every]
    if (share := reward_shaping.repeated_share(member, _NGRAM)) is not None
  ]
  return float(np.mean(shares)) if shares else math.nan


def write_gap(
  run_dir: pathlib.Path, round_: int, gap: logprob_gap.Gap
) -> pathlib.Path:
  """Appends a round's comparison to logprob_gap.jsonl.

  A line holds `round`, the number of compared `tokens`, `mean` and `max` of
  their gaps in nats, and `engine`, `learner` and `lags` of at most 512 of them;
  see `logprob_gap.Gap.sample`. Values that are not finite are null. A round
  that is repeated adds another line, and the last one counts.
  """
  sample = gap.sample(_TOKENS_KEPT)
  row = {
    "round": round_,
    "tokens": gap.tokens,
    "mean": _finite(gap.mean),
    "max": _finite(gap.max),
    "engine": [_finite(x) for x in sample.engine.tolist()],
    "learner": [_finite(x) for x in sample.learner.tolist()],
    "lags": sample.lags.tolist(),
  }
  path = run_dir / "logprob_gap.jsonl"
  line_file.LineFile(path).append([json.dumps(row)])
  return path


def _finite(value: float) -> float | None:
  return float(f"{value:.7g}") if math.isfinite(value) else None
