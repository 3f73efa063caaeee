"""Ends of a run in one process: stalls, faults, non-finite gradients."""

import asyncio
import collections
import dataclasses
import functools
import gc
import json
import os
import pathlib
import re
import signal
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import pytest

from envs import base
from envs.rewards import rewards
from launch.cli import workdir
from launch.run import display, local
from models import config as model_config
from rl import experiment as experiment_lib
from rl.algorithms import kl, presets, references
from rl.engine.builtin import engine as builtin_engine
from rl.engine.builtin import settings as engine_settings
from rl.engine.builtin import sizing
from rl.loop import warm_start
from rl.pools import recovery
from rl.rollout import group_rollout
from rl.runtime import trace
from rl.schedule import overlap
from rl.settings import overrides
from rl.testing import fakes
from rl.train import optimizers

pytestmark = pytest.mark.compiled

SCHEDULE = overlap.in_flight(4, 1, 2)
LIMITS = group_rollout.Rollout(group_size=4, max_tokens=16)


class _Silent(builtin_engine.BuiltinEngine):
  """Never answers requests of an evaluation, like a device that hangs."""

  async def generate(self, request):
    if request.session.startswith("eval/"):
      await asyncio.get_running_loop().create_future()
    return await super().generate(request)


class _Dying(builtin_engine.BuiltinEngine):
  """Stops at its first request."""

  async def generate(self, request):
    await self.close()
    return await super().generate(request)


class _Turned(builtin_engine.BuiltinEngine):
  """Rotates positions the wrong way round, as a sign in a kernel would.

  Rotating by -x is: flip the second half, rotate by x, flip it again. The last
  flip cancels in the product of queries and keys, and the first may be made in
  the weights that project to them.
  """

  async def start(self, params, *args, **options):
    await super().start(_turned(params), *args, **options)

  async def update_weights(self, version, params, *args, **options):
    await super().update_weights(version, _turned(params), *args, **options)


def _turned(params):
  def flip(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if not name.endswith(("/query", "/key")):
      return leaf
    half = leaf.shape[-1] // 2
    return leaf.at[..., half:].multiply(-1)

  with jax.transfer_guard("allow"):
    return jax.tree_util.tree_map_with_path(flip, params)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SilentSettings(engine_settings.EngineSettings):
  """Settings of an engine that never answers evaluations."""

  kind: ClassVar = _Silent

  def build(self, config, layout, thread):
    return self.kind(
      config,
      self.sizes(config, [sizing.Room(layout)]),
      layout,
      thread,
      self.capabilities(config),
      self,
    )


class DyingSettings(SilentSettings):
  """Settings of an engine that never answers at all."""

  kind: ClassVar = _Dying


class TurnedSettings(SilentSettings):
  """Settings of an engine with a wrong kernel."""

  kind: ClassVar = _Turned


def experiment(
  engine: Callable[..., Any] = engine_settings.EngineSettings,
  episodes=0,
  **changes,
):
  base = experiment_lib.Experiment(
    environment=fakes.Counting(turns=2),
    reward=rewards.Outcome(),
    model=model_config.tiny_moe(
      vocab_size=7, num_layers=1, d_model=32, max_length=16
    ),
    rollout=LIMITS,
    engine=engine(slots=32, row_buckets=(32,), chunk_buckets=(4,)),
    overlap=SCHEDULE,
    batch=experiment_lib.BatchShape(rows=8, length=16, tail_rows=None),
    evaluation=experiment_lib.Evaluation(episodes=episodes),
    rounds=4,
  )
  return dataclasses.replace(base, **changes)


def write_config(directory, schedule):
  """Writes as much of a run's settings as its report reads."""
  base = experiment()
  data = {
    "overlap": overrides.to_json(schedule),
    "rollout": {"group_size": LIMITS.group_size},
    "bounds": overrides.to_json(base.bounds),
    "model": overrides.to_json(base.model.with_auto_dtype("float32")),
    "publishing": overrides.to_json(base.publishing),
  }
  (directory / "config.json").write_text(json.dumps(data))


@pytest.fixture
def run_dir(tmp_path):
  """The directory of a run; the test fails if the run hangs."""
  write_config(tmp_path, SCHEDULE)

  def hangs(number, frame):
    raise TimeoutError("the run does not end")

  before = signal.signal(signal.SIGALRM, hangs)
  signal.alarm(120)
  yield tmp_path
  signal.alarm(0)
  signal.signal(signal.SIGALRM, before)


def test_an_evaluation_without_an_answer_ends_the_run(run_dir, capsys):
  # One turn of at most 0.1 s; nothing is trained yet.
  quick = dataclasses.replace(LIMITS, max_turns=1, step_s=0.1)
  quick = dataclasses.replace(
    quick,
    grading=dataclasses.replace(quick.grading, attempts=1, deadline_s=0.5),
  )
  silent = experiment(SilentSettings, 4, rollout=quick, progress_timeout_s=1.0)
  assert local.train(silent, run_dir) == 1
  told = capsys.readouterr().out
  assert "for the evaluation of version 0 (deadline 1.0 s)" in told
  assert "episode eval/0/0/0  an answer of the engine" in told
  assert f"report: {run_dir}" in told


def test_a_run_whose_engine_stops_again_and_again_says_so_and_ends(
  run_dir, capsys
):
  twice = recovery.Recovery(attempts=2, first_wait_s=0.0)
  assert local.train(experiment(DyingSettings, recovery=twice), run_dir) == 1
  told = capsys.readouterr().out
  assert "engine 0 has stopped because the engine was closed; restart 1" in told
  assert "engine 0 serves again" in told
  error = "error: all 1 engines have stopped, engine 0 because the engine was "
  assert f"{error}closed; recovery.attempts=2 allows no further start" in told
  assert told.count("error: ") == 1


@pytest.mark.slow
def test_an_engine_with_a_wrong_kernel_ends_the_run_in_its_second_round(
  run_dir, capsys
):
  wrong = experiment(TurnedSettings, rounds=9)
  assert local.train(wrong, run_dir) == 1
  told = capsys.readouterr().out
  assert "error: round 2: logprob_gap_mean is 0.0" in told
  assert "above 0.003, for 2 rounds" in told
  # The round is saved, and the report says why the run has ended.
  assert (run_dir / "checkpoints" / "2").exists()
  page = (run_dir / "report.html").read_text()
  assert "logprob_gap_mean is 0.0" in page
  assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
def test_engines_start_beside_the_warm_start_and_take_its_weights(
  run_dir, capsys
):
  warm = warm_start.WarmStart(steps=40, episodes=8)
  ahead = functools.partial(engine_settings.EngineSettings, compile_ahead=True)
  tree = experiment(ahead, warm_start=warm, rounds=1, log_startup=True)
  assert local.train(tree, run_dir) == 0
  spans = list(trace.read(run_dir / "spans.jsonl"))
  steps = [span for span in spans if span.name == "warm start"]
  assert len(steps) == 40
  assert any(span.name == "warm up" for span in spans)
  assert min(s.start for s in spans if s.track == "decode") < steps[-1].end
  (row,) = map(json.loads, (run_dir / "metrics.jsonl").open())
  assert row["logprob_gap_max"] < 1e-4
  told = capsys.readouterr().out
  assert "decode: warm up" in told
  # What they do is said once nothing else is waited for.
  assert re.search(r"warm start done.*compiling the engine \d", told, re.S)
  assert "first update after" in told


def test_a_warm_start_of_faults_alone_ends_the_run_in_two_lines(
  run_dir, capsys
):
  tree = experiment(
    environment=fakes.Counting(turns=2, fault="start"),
    warm_start=warm_start.WarmStart(steps=1, episodes=2),
  )
  assert local.train(tree, run_dir) == 1
  *_, error, more = capsys.readouterr().out.splitlines()
  assert "error: warm_start: of 2 demonstrations of counting" in error
  assert more.endswith("more: twinmesh explain TM-R04")
  kept, cure = workdir.failure(run_dir).splitlines()
  assert error.endswith(kept)
  assert more.endswith(cure)


@dataclasses.dataclass(frozen=True)
class Broken:
  """A reward that is nan, or raises."""

  raises: bool
  stateless: bool = True

  async def __call__(self, task, transcripts):
    if self.raises:
      raise KeyError("answer")
    return [base.Grade(float("nan"), {}) for _ in transcripts]


@pytest.mark.parametrize(
  ("raises", "says"),
  [
    (False, "nan"),
    pytest.param(True, "raised KeyError", marks=pytest.mark.slow),
  ],
)
def test_a_reward_that_never_works_ends_the_run_and_is_named(
  run_dir, capsys, raises, says
):
  tree = experiment(reward=Broken(raises), rounds=9)
  assert local.train(tree, run_dir) == 1
  told = capsys.readouterr()
  # The time of day comes first.
  warned = [line.split(" ", 1)[1] for line in told.err.splitlines()]
  starts = [f"warning: round {i} trained nothing: 16 of 16" for i in (1, 2, 3)]
  bounds = [line for line in warned if "trained nothing" not in line]
  warned = [line for line in warned if line not in bounds]
  assert [line[: len(starts[0])] for line in warned] == starts
  assert [line[:36] for line in bounds] == [
    "warning: round 3: fault_share is 1, "
  ]
  assert all("reward_fault: " in line and says in line for line in warned)
  assert "faults 16 (reward_fault: reward" in told.out
  assert "error: rounds in a row that trained nothing" in told.out
  assert "3, and max_skipped=2 allows no more" in told.out
  assert " faults) + 0 dropped" in told.out
  # The last round is saved and has a report.
  assert (run_dir / "checkpoints" / "3").exists()
  assert "Faults left nothing to train" in (run_dir / "report.html").read_text()


def test_what_a_failed_run_broke_is_told_before_its_error(run_dir, capsys):
  stray = {"t": 0.0, "kind": "published", "version": 1}
  (run_dir / "events.jsonl").write_text(json.dumps(stray) + "\n")
  wild = optimizers.AdamW(learning_rate=1e30)
  assert local.train(experiment(optimizer=wild), run_dir) == 1
  told = capsys.readouterr().out
  assert "error: version 1 was published but never begun" in told


def test_what_engine_and_learner_say_of_the_same_tokens_is_kept(run_dir):
  retention = experiment_lib.Retention(episodes_every=3)
  assert local.train(experiment(retention=retention), run_dir) == 0
  lines = (run_dir / "logprob_gap.jsonl").read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  assert [row["round"] for row in rows] == [1, 4]
  for row in rows:
    assert 0 < row["max"] < 1e-4
    assert len(row["engine"]) == len(row["learner"]) == row["tokens"] > 0
    assert set(row["lags"]) <= {0, 1}


def test_a_run_goes_on_without_its_output(run_dir, monkeypatch, capsys):
  with open("/dev/full", "w") as full:
    monkeypatch.setattr(sys, "stdout", full)
    assert local.train(experiment(rounds=1), run_dir) == 0
  assert (run_dir / "checkpoints" / "1").exists()
  assert capsys.readouterr().err.count("stdout takes no more") == 1


@dataclasses.dataclass
class Replacing:
  """A reward in the midst of whose calls the directory of the run is moved."""

  directory: pathlib.Path
  stateless: ClassVar = True

  async def __call__(self, task, transcripts):
    away = self.directory.with_name("away")
    if not away.exists():
      self.directory.rename(away)
      self.directory.mkdir()
    return await rewards.Outcome()(task, transcripts)


def test_a_run_that_is_moved_writes_nothing_where_another_begins(
  run_dir, capsys
):
  path = run_dir / "run"
  path.mkdir()
  write_config(path, SCHEDULE)
  assert local.train(experiment(reward=Replacing(path)), path) == 1
  assert "error: " + str(path) in capsys.readouterr().out
  assert list(path.iterdir()) == []


@pytest.mark.parametrize(
  ("episodes", "told"),
  [(0, "after all 1 rounds\n"), (4, "after all 1 rounds; to evaluate:\n")],
)
def test_a_run_stopped_in_its_last_round_says_what_is_left(
  episodes, told, run_dir, monkeypatch, capsys
):
  def stop(*_):
    os.kill(os.getpid(), signal.SIGTERM)

  monkeypatch.setattr(display.Display, "update", stop)
  tree = experiment(rounds=1, episodes=episodes)
  assert local.train(tree, run_dir) == 128 + signal.SIGTERM
  assert f"saved {told}" in capsys.readouterr().out


def test_a_run_of_no_rounds_is_its_warm_start_and_is_saved(run_dir, capsys):
  tree = experiment(
    warm_start=warm_start.WarmStart(steps=20, episodes=4, exploration=0.0),
    rounds=0,
    episodes=4,
  )
  assert local.train(tree, run_dir) == 0
  assert (run_dir / "checkpoints" / "0").exists()
  assert "evaluation: success" in capsys.readouterr().out
  (row,) = (run_dir / "evaluations.jsonl").read_text().splitlines()
  assert json.loads(row)["version"] == 0
  # The same command finds nothing left to do.
  assert local.train(tree, run_dir) == 0
  assert "going on after the warm start" in capsys.readouterr().out


class Census:
  """A reward that counts the objects of the process, every 20 rounds."""

  stateless = True

  def __init__(self):
    self.counts: list[collections.Counter[str]] = []
    self._episodes = 0

  async def __call__(self, task, transcripts):
    self._episodes += len(transcripts)
    a_round = SCHEDULE.groups_per_round * LIMITS.group_size
    if self._episodes % (20 * a_round) == 0:
      gc.collect()
      kinds = map(type, gc.get_objects())
      self.counts.append(
        collections.Counter(
          kind.__name__ for kind in kinds if kind.__module__.startswith("rl.")
        )
      )
    return await rewards.Outcome()(task, transcripts)


@pytest.mark.slow
def test_a_run_keeps_nothing_of_the_rounds_that_are_over(run_dir, monkeypatch):
  monkeypatch.setattr(trace, "_ADD_UP_EVERY", 20)
  census = Census()
  assert local.train(experiment(reward=census, rounds=100), run_dir) == 0
  # After 20, 40, 60, 80 and 100 rounds.
  before, *_, after = census.counts
  # One object a round would be 80; what is under way at a time differs less.
  assert max((after - before).values(), default=0) < 80


@pytest.mark.slow
def test_critic_and_reference_outlive_a_stop(run_dir, tmp_path_factory):
  whole, schedule = tmp_path_factory.mktemp("whole"), overlap.sync(4)
  for directory in (whole, run_dir):
    write_config(directory, schedule)
  tree = experiment(
    algorithm=presets.Ppo(
      kl=kl.KlPenalty(weight=0.1),
      reference=references.Initial(memory="host"),
      epochs=2,
    ),
    overlap=schedule,
    optimizer=optimizers.AdamW(learning_rate=0.02),
  )
  assert local.train(tree, whole) == 0
  assert local.train(dataclasses.replace(tree, rounds=2), run_dir) == 0
  assert local.train(tree, run_dir) == 0
  rows = [
    [json.loads(line) for line in (each / "metrics.jsonl").open()]
    for each in (whole, run_dir)
  ]
  for one, other in zip(*rows, strict=True):
    for name in ("kl", "value_loss", "loss", "grad_norm"):
      # Not bit-equal: the rows that share a dispatch vary.
      assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6)
  # The policy has moved away from where it began.
  assert 0 < rows[1][0]["kl"] < 0.5 * rows[1][-1]["kl"]


def test_a_log_that_cannot_be_checked_does_not_hide_the_error(run_dir, capsys):
  (run_dir / "config.json").unlink()
  wild = optimizers.AdamW(learning_rate=1e30)
  assert local.train(experiment(optimizer=wild), run_dir) == 1
  assert "the log was not checked" in capsys.readouterr().out
