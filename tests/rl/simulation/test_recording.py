"""Recorded episodes in a simulated run."""

import dataclasses

import numpy as np

from models import config as model_config
from models import sharding
from rl.audit import event_log
from rl.data import trajectory
from rl.engine.builtin import settings as engine_settings
from rl.schedule import overlap
from rl.simulation import (
  dispatched_engine,
  recording,
  simulate,
  workload,
)
from rl.simulation import world as world_lib
from tests.helpers import simulated_runs


def group(number, turns):
  """Returns a group of two, of contexts of 3 ids and answers of 2."""

  def member(index):
    return trajectory.Trajectory(
      task_id=f"t/{number}",
      group_id=number,
      index=index,
      turns=[
        trajectory.Turn(
          context=np.full(3, 10 * number + index, np.int32),
          tokens=np.array([turn, 5], np.int32),
          logprobs=np.zeros(2, np.float32),
          versions=np.zeros(2, np.int32),
          stop="length",
          env_s=0.1 * turn,
        )
        for turn in range(turns)
      ],
      status=trajectory.Status.COMPLETED,
    )

  members = [member(index) for index in range(2)]
  return trajectory.Group(group_id=number, trajectories=members, admitted=0)


GROUPS = [group(1, turns=1), group(2, turns=3)]


def test_tasks_get_groups_in_turn_and_plays_their_members():
  draws = recording.RecordedDraws(workload.Workload(), 0, GROUPS)
  plays = [(70, 0), (20, 0), (20, 1), (90, 0), (70, 2)]
  members = [workload.GroupMember(*play) for play in plays]
  assert [draws.count("turns", one) for one in members] == [1, 3, 3, 1, 1]
  context, answer = draws.ids(members[2], 1)
  assert context.tolist() == [21, 21, 21, 0, 5, 21, 21, 21]
  assert answer.tolist() == [1, 5]
  assert draws.count("reply_tokens", members[2], 0) == 3
  waits = [draws.of_turn("step_s", members[2], turn) for turn in range(3)]
  assert waits == [0.1 * turn for turn in range(3)]
  assert draws.of_task("prompt_tokens", 20) == 3.0


def test_a_run_repeats_them_on_the_built_in_engine():
  settings = simulated_runs.settings(overlap.in_flight(2, max_staleness=1))
  (pool,) = settings.cluster.pools
  dispatched = dispatched_engine.Dispatches(
    settings=engine_settings.EngineSettings(
      slots=8, row_buckets=(4,), chunk_buckets=(4,), steps_per_dispatch=2
    ),
    model=model_config.tiny_moe(max_length=64),
    layout=sharding.Layout(sharding.make_mesh(1, 1, 1)),
    dispatch_s=0.5,
  )
  pool = dataclasses.replace(pool, dispatches=dispatched)
  cluster = dataclasses.replace(settings.cluster, pools=(pool,))
  settings = dataclasses.replace(
    settings,
    cluster=cluster,
    rollout=dataclasses.replace(settings.rollout, turn_tokens=2, max_tokens=64),
  )
  world = world_lib.World(settings.workloads, 0, recorded=GROUPS)
  record = simulate.simulate(settings, world)
  assert not record.violations
  ended = [*event_log.of_kind(record.events, "ended")]
  assert {e["turns"] for e in ended} == {1, 3}
  # Answers of 2 in every turn, and contexts of 3.
  assert all(e["length"] == 5 * e["turns"] for e in ended)
