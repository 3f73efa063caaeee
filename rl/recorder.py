"""Samples of trajectories on disk: one readable JSON line each."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32

from rl import episode, trajectory


def write(
  run_dir: pathlib.Path,
  round_: int,
  groups: Sequence[trajectory.Group],
  advantages: Sequence[Float32[np.ndarray, " G"]],
  chat: episode.Chat,
) -> pathlib.Path:
  """Writes every member of `groups` to trajectories/round_NNNNNN.jsonl.

  A line holds `trajectory_to_json`, the advantage, and every id as a word.
  """
  path = run_dir / "trajectories" / f"round_{round_:06d}.jsonl"
  path.parent.mkdir(exist_ok=True)
  with path.open("w") as file:
    for group, of_group in zip(groups, advantages, strict=True):
      for member, value in zip(group.trajectories, of_group, strict=True):
        line = readable(member, chat) | {"advantage": float(value)}
        file.write(json.dumps(line) + "\n")
  return path


def readable(
  member: trajectory.Trajectory, chat: episode.Chat
) -> dict[str, Any]:
  """Returns a trajectory as JSON data with its ids spelled out."""
  data = trajectory.trajectory_to_json(member)
  for turn in data["turns"]:
    turn["context_words"] = [chat.token(i) for i in turn["context"]]
    turn["words"] = [chat.token(i) for i in turn["tokens"]]
  return data
