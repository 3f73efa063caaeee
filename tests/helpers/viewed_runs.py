"""Directories of runs for `launch.view`, written by hand."""

import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from rl.schedule import overlap
from rl.settings import overrides
from tests.helpers import event_logs

SCHEDULE = overlap.in_flight(4, 1, 1)
EVIL = '<img src=x onerror="document.body.dataset.hurt=1">\u202e</script>'


def write_lines(path: pathlib.Path, rows: Sequence[Any]) -> None:
  """Writes rows as JSON lines."""
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def metrics(rounds: int, level: float = 0.0) -> list[dict[str, Any]]:
  """Returns rows whose success is `level` and a tenth more each round."""
  return [
    {
      "round": i,
      "success": level + 0.1 * i,
      "entropy": 2.0 - 0.1 * i,
      "sampled_tokens": 100.0,
      "time_s": 2.0 * i,
    }
    for i in range(1, rounds + 1)
  ]


def run(
  path: pathlib.Path, rounds: int = 4, *, level: float = 0.0, **settings: Any
) -> pathlib.Path:
  """Writes a run with settings, metrics, a log and spans."""
  path.mkdir(parents=True)
  config = {
    "class": "rl.experiment.Experiment",
    "rounds": rounds,
    "seed": 0,
    "overlap": overrides.to_json(SCHEDULE),
    "rollout": {"group_size": event_logs.GROUP_SIZE},
    **settings,
  }
  (path / "config.json").write_text(json.dumps(config))
  write_lines(path / "metrics.jsonl", metrics(rounds, level))
  write_lines(path / "events.jsonl", event_logs.run(SCHEDULE, rounds))
  spans = [
    {"track": track, "name": name, "start": i + start, "end": i + start + 0.4}
    for i in range(rounds)
    for track, name, start in (
      ("learner", "accumulate", 0.0),
      ("decode", "decode", 0.5),
    )
  ]
  write_lines(path / "spans.jsonl", spans)
  return path


def tuning(path: pathlib.Path, **settings: Any) -> pathlib.Path:
  """Writes a run of four steps of fine-tuning, evaluated at its end."""
  path.mkdir(parents=True, exist_ok=True)
  config = {"rounds": 0, "warm_start": {"steps": 4}, **settings}
  (path / "config.json").write_text(json.dumps(config))
  steps = [
    {"step": i, "loss": 1 / i, "tokens": 1e2, "step_s": 2.0, "time_s": 2.0 * i}
    for i in range(1, 5)
  ]
  steps[1]["eval/loss"], steps[3]["eval/loss"] = 0.75, 0.5
  write_lines(path / "warm_start.jsonl", steps)
  write_lines(path / "evaluations.jsonl", [{"round": 0, "success": 1.0}])
  return path


def closed_beside(path: pathlib.Path) -> pathlib.Path:
  """Returns the parent of a run and of a directory that cannot be looked into.

  A path that is too long is refused to root as well, unlike one of others.
  """
  most = os.pathconf("/", "PC_PATH_MAX") - len("/run/evaluations.jsonl_")
  while (room := most - len(str(path))) > 1:
    path /= "x" * min(room - 1, 200)
  run(path / "run")
  (path / "theirs_with_a_name").mkdir()
  return path


def trajectory(
  group: int, index: int, *, words: Sequence[str] = ("say", "it"), **fields: Any
) -> dict[str, Any]:
  """Returns a line of trajectories/ with one turn."""
  count = len(words)
  return {
    "task_id": f"game/train/{group}",
    "group_id": group,
    "index": index,
    "turns": [
      {
        "context": [1, 2],
        "context_words": ["<b>", "ask"],
        "tokens": list(range(10, 10 + count)),
        "words": list(words),
        "logprobs": [-0.5] * count,
        "versions": [0] * count,
        "stop": "stop",
        "decode_s": 0.1,
        "env_s": 0.2,
      }
    ],
    "status": "completed",
    "reward": float(index % 2),
    "advantage": index % 2 - 0.5,
    "fault": "",
    **fields,
  }


def write_round(
  run_dir: pathlib.Path, number: int, rows: Sequence[dict[str, Any]]
) -> pathlib.Path:
  """Writes the trajectories of a round."""
  path = run_dir / "trajectories" / f"round_{number:06d}.jsonl"
  write_lines(path, rows)
  return path
