"""Episodes of a run as the simulation beside a benchmark repeats them."""

import dataclasses

import numpy as np
import pytest

from benchmarks import calibration, one_engine
from configs import guess_number_moe
from envs import base, delayed
from rl.data import trajectory

TASK = base.Task(id="t", index=0, split="train", seed=3)


def run(source, answers):
  """Returns a run of one episode, whose steps took a second each."""
  experiment = dataclasses.replace(
    guess_number_moe.get_config(), environment=source
  )
  chat = experiment.build_chat()
  turns = [
    trajectory.Turn(
      context=np.zeros(1, np.int32),
      tokens=tokens,
      logprobs=np.zeros(len(tokens), np.float32),
      versions=np.zeros(len(tokens), np.int32),
      stop="stop",
      env_s=1.0,
    )
    for tokens in map(chat.encode_answer, answers)
  ]
  member = trajectory.Trajectory(
    task_id=TASK.id,
    group_id=0,
    index=0,
    turns=turns,
    status=trajectory.Status.COMPLETED,
  )
  group = trajectory.Group(
    group_id=0, trajectories=[member], admitted=0, task=TASK
  )
  return one_engine.Run(
    experiment=experiment,
    events=(),
    spans=(),
    metrics=(),
    groups=[group],
    wall_s=0.0,
    cpu_s=0.0,
  )


PLAIN = guess_number_moe.get_config().environment
SLOW = delayed.Delayed(source=PLAIN, median_s=0.03, sigma=1.0)


@pytest.mark.parametrize(
  ("source", "waits"),
  [
    (PLAIN, [0.0, 0.0]),
    (SLOW, [SLOW.wait_s(TASK, ["7"]), SLOW.wait_s(TASK, ["7", "3"])]),
  ],
)
def test_repeated_steps_take_what_is_declared(source, waits):
  (group,) = calibration.recorded(run(source, ["7", "3"]))
  assert [turn.env_s for turn in group.trajectories[0].turns] == waits
