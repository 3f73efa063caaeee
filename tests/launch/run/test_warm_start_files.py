"""Files of a warm start that is stopped, killed, damaged and continued."""

import asyncio
import contextlib
import dataclasses
import functools
import gc
import json
import math
import os
import pathlib
import shutil
import signal

import jax
import numpy as np
import pytest

from envs import recordings, rows
from envs.rewards import rewards
from launch.cli import flags, workdir
from launch.run import load_run, local, warm_start_files
from models import config as model_config
from models import lora
from rl import assemble, initial_state
from rl import experiment as experiment_lib
from rl.algorithms import preference_loss
from rl.engine.builtin import settings as engine_settings
from rl.loop import fine_tuning, warm_start
from rl.rollout import group_rollout
from rl.runtime import checkpoint, trace
from rl.schedule import overlap
from rl.settings import overrides
from rl.testing import fakes
from rl.train import optimizers
from tests.helpers import commands, machine_speed, processes

# See test_checkpoint: orbax drops its other reads when one fails.
pytestmark = [
  pytest.mark.compiled,
  pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
STEPS = 12
DENSE = model_config.tiny(vocab_size=7, num_layers=1, d_model=32, max_length=16)
MODELS = {
  "dense": DENSE,
  "adapters": dataclasses.replace(DENSE, lora=lora.Lora(rank=2)),
}


def experiment(model=DENSE, every=4, **changes):
  base = experiment_lib.Experiment(
    environment=fakes.Counting(turns=2),
    reward=rewards.Outcome(),
    model=model,
    rollout=group_rollout.Rollout(group_size=4, max_tokens=16),
    engine=engine_settings.EngineSettings(
      slots=32, row_buckets=(32,), chunk_buckets=(4,)
    ),
    overlap=overlap.sync(4),
    batch=experiment_lib.BatchShape(rows=4, length=16, tail_rows=None),
    evaluation=experiment_lib.Evaluation(episodes=4),
    warm_start=warm_start.WarmStart(
      steps=STEPS,
      episodes=4,
      exploration=0.5,
      optimizer=optimizers.AdamW(learning_rate=0.01),
      checkpoint_every=every,
    ),
    rounds=0,
  )
  return dataclasses.replace(base, **changes)


def imitate(run_dir, tree, stop_after=0, during=lambda files: None):
  """Runs a warm start in a directory, up to step `stop_after` if above 0.

  Returns:
    (state or None, what was noted). `during` is called before the last step.
  """
  said = []
  run_dir.mkdir(exist_ok=True)

  async def start():
    parts = assemble.build(tree)
    files = warm_start_files.WarmStartFiles(
      run_dir,
      tree,
      parts.spans,
      said.append,
      functools.partial(initial_state.fetched, parts),
    )

    def report(text):
      if text == f"warm start {stop_after}/{STEPS}":
        files.stop()
      if text == f"warm start {STEPS}/{STEPS}":
        during(files)

    with contextlib.closing(files):
      try:
        return await initial_state.create(parts, report, files)
      except warm_start_files.WarmStartStopped as stopped:
        said.append(str(stopped))
        return None
      finally:
        await parts.close()

  return asyncio.run(start()), said


def as_bytes(state):
  return [np.asarray(x).tobytes() for x in jax.tree.leaves(state.params)]


def lines(run_dir):
  text = (run_dir / "warm_start.jsonl").read_text()
  return [json.loads(line) for line in text.splitlines()]


def learned(run_dir):
  """Returns the lines without their times."""
  return [
    {k: v for k, v in row.items() if "_s" not in k} for row in lines(run_dir)
  ]


def test_trackers_get_its_numbers_under_names_of_its_own(tmp_path):
  class Kept(list):
    def write(self, values, step):
      self.append((step, dict(values)))

    def close(self):
      raise AssertionError("whoever opened it closes it")

  kept = Kept()
  files = warm_start_files.WarmStartFiles(
    tmp_path,
    experiment(),
    trace.Trace(None),
    lambda text: None,
    lambda now: asyncio.sleep(0, now),
    tracker=kept,
  )
  files.on_begin(None, STEPS)
  row = dict.fromkeys(("grad_norm", "tokens", "entropy", "skipped"), 1.0)
  files.on_step(1, {"loss": 0.5, "eval/loss": math.nan, **row})
  files.close()
  ((step, found),) = kept
  assert (step, found["warm_start/loss"]) == (1, 0.5)
  assert "warm_start/eval/loss" not in found
  (file,) = (tmp_path / "tensorboard" / "warm_start").iterdir()
  assert b"warm_start/loss" in file.read_bytes()


def damage(run_dir, step):
  """Cuts the largest file of a checkpoint in half."""
  files = (run_dir / "warm_start" / str(step)).rglob("*")
  data = max((p for p in files if p.is_file()), key=lambda p: p.stat().st_size)
  os.truncate(data, data.stat().st_size // 2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """Directory and parameters of an uninterrupted warm start."""
  run_dir = tmp_path_factory.mktemp("whole")
  state, _ = imitate(run_dir, experiment())
  return run_dir, as_bytes(state)


@pytest.fixture(scope="module")
def stopped_at_10(tmp_path_factory):
  run_dir = tmp_path_factory.mktemp("stopped")
  state, said = imitate(run_dir, experiment(), stop_after=10)
  assert state is None
  assert said == [f"saved after 10 of {STEPS} steps of the warm start"]
  assert workdir.checkpoints(run_dir, workdir.WARM_START) == ["10", "8"]
  return run_dir


@pytest.fixture
def stopped(stopped_at_10, tmp_path):
  yield pathlib.Path(shutil.copytree(stopped_at_10, tmp_path / "stopped"))
  gc.collect()  # Or what orbax dropped surfaces in another file.


def test_each_step_has_a_line(whole):
  rows = lines(whole[0])
  assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
  for row in rows:
    # Two turns of an episode, each a word and the end of the answer.
    assert (row["tokens"], row["skipped"]) == (4 * 2 * 2, 0)
    assert min(row["grad_norm"], row["step_s"]) > 0
  # Seven equally likely words: ln 7. Then it learns the frequent ones.
  assert rows[0]["loss"] == pytest.approx(math.log(7), abs=0.3)
  assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
  times = [row["time_s"] for row in rows]
  assert times == sorted(times)


async def test_one_that_is_not_done_can_be_used_as_it_is(
  stopped, tmp_path, capsys
):
  start = experiment().warm_start
  assert start is not None
  ten = dataclasses.replace(start, steps=10)
  # What a step learns depends on its number alone.
  state, _ = await asyncio.to_thread(
    imitate, tmp_path / "ten", experiment(warm_start=ten)
  )
  async with load_run.restored(experiment(), stopped) as (_, found):
    assert as_bytes(found.state) == as_bytes(state)
    assert found.step == 0
  told = f"{stopped} is not done: weights after 10 steps of its warm start\n"
  assert capsys.readouterr().err == told


def spelled():
  """Chats of two answers, of the words that the models know."""
  words = ("go", "on", "yes", "no")
  turn = [{"role": "user"}, {"role": "assistant"}]
  return [
    {"messages": [m | {"content": w} for w in (a, b) for m in turn]}
    for a in words
    for b in words
  ]


def preferred():
  """Pairs in which "yes" is better than any other word."""
  return [
    {"prompt": asked, "chosen": "yes", "rejected": said}
    for asked in ("go", "on", "yes", "no")
    for said in ("go", "on", "no")
  ]


def tuned(source, **changes):
  return {
    "environment": source,
    "warm_start": fine_tuning.FineTuning(
      steps=STEPS,
      examples=3,
      optimizer=optimizers.AdamW(learning_rate=0.01),
      eval_every=5,
      checkpoint_every=4,
      **changes,
    ),
  }


def same(data):
  return rows.Rows(data=data, eval_data=data)


RUNS = {
  "dense": {},
  "adapters": {"model": MODELS["adapters"]},
  "chats": tuned(recordings.Chats(rows=same(spelled))),
  "pairs": tuned(
    recordings.Pairs(rows=same(preferred)), loss=preference_loss.Dpo()
  ),
  "pairs and adapters": {"model": MODELS["adapters"]}
  | tuned(recordings.Pairs(rows=same(preferred)), loss=preference_loss.Dpo()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_one_that_was_stopped_goes_on_bit_equal(name, tmp_path):
  tree = experiment(**RUNS[name])
  state, _ = imitate(tmp_path / "whole", tree)
  assert imitate(tmp_path / "stopped", tree, stop_after=6)[0] is None
  again, said = imitate(tmp_path / "stopped", tree)
  assert said[0] == f"going on after 6 of {STEPS} steps of the warm start"
  assert as_bytes(again) == as_bytes(state)
  assert learned(tmp_path / "stopped") == learned(tmp_path / "whole")
  if name.startswith("pairs"):
    check_preferences(lines(tmp_path / "whole"))


def check_preferences(rows):
  # ln 2 where the policy is the reference. All pairs are held out, too.
  assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
  measured = [row for row in rows if "eval/loss" in row]
  assert [row["step"] for row in measured] == [5, 10, STEPS]
  assert measured[-1]["eval/loss"] < measured[0]["eval/loss"] < math.log(2)
  assert measured[-1]["eval/accuracy"] > 0.8
  assert measured[-1]["eval/margin"] > 0


def test_held_out_rows_have_the_loss_that_a_step_on_them_would_have(tmp_path):
  # One step of all 16 chats, so small that the parameters stay.
  still = optimizers.AdamW(learning_rate=1e-30)
  settings = tuned(recordings.Chats(rows=same(spelled)))
  settings["warm_start"] = fine_tuning.FineTuning(
    epochs=1, examples=16, optimizer=still
  )
  _, said = imitate(tmp_path, experiment(**settings))
  (row,) = lines(tmp_path)
  loss = f"loss {row['eval/loss']:.3f}"
  assert said == [f"held-out rows after 1 of 1 steps of the warm start: {loss}"]
  # Two answers of a word and their end each.
  assert row["tokens"] == 16 * 2 * 2
  assert row["eval/loss"] == pytest.approx(row["loss"], rel=1e-6)


def test_a_line_that_a_kill_cut_is_written_again(stopped, whole):
  with (stopped / "warm_start.jsonl").open("a") as file:
    file.write('{"step": 11, "loss": 1.5}\n{"step": 12, "lo')
  state, _ = imitate(stopped, experiment())
  assert as_bytes(state) == whole[1]
  assert learned(stopped) == learned(whole[0])


def test_a_damaged_checkpoint_gives_way_to_the_one_before(stopped, whole):
  damage(stopped, 10)
  state, said = imitate(stopped, experiment())
  assert "checkpoint 10 (" in said[0]
  assert "is damaged and was left out" in said[0]
  assert said[1] == f"going on after 8 of {STEPS} steps of the warm start"
  assert as_bytes(state) == whole[1]
  assert learned(stopped) == learned(whole[0])


def test_checkpoints_that_are_all_damaged_end_it(stopped):
  for step in (8, 10):
    damage(stopped, step)
  before = lines(stopped)
  with pytest.raises(checkpoint.Unsaved, match=r"all are damaged: 10, 8\."):
    imitate(stopped, experiment())
  assert lines(stopped) == before


def test_a_checkpoint_of_another_model_is_refused(stopped):
  wide = dataclasses.replace(DENSE, d_model=64)
  with pytest.raises(checkpoint.Mismatch, match="leaf"):
    imitate(stopped, experiment(wide))


def test_other_settings_are_refused_before_anything_is_cleared(stopped):
  tree = flags.load(str(commands.ROOT / "configs/guess_number_sft.py"))

  def claim(**changes):
    changed = dataclasses.replace(tree.warm_start, **changes)
    workdir.claim(
      stopped, dataclasses.replace(tree, warm_start=changed)
    ).close()

  with contextlib.closing(workdir.claim(stopped.parent / "new", tree)):
    shutil.copy(stopped.parent / "new" / "config.json", stopped)
  with pytest.raises(ValueError, match=r"warm_start\.steps: 250 -> 251"):
    claim(steps=251)
  claim(checkpoint_every=5)
  assert len(lines(stopped)) == 10
  assert workdir.checkpoints(stopped, workdir.WARM_START) == ["10", "8"]


def test_one_that_was_stopped_in_its_last_step_trains_no_more(tmp_path, whole):
  _, said = imitate(tmp_path, experiment(), stop_after=STEPS)
  assert said == [f"saved after {STEPS} of {STEPS} steps of the warm start"]
  state, _ = imitate(tmp_path, experiment())
  assert as_bytes(state) == whole[1]
  assert learned(tmp_path) == learned(whole[0])


def test_a_checkpoint_that_cannot_be_saved_ends_it(tmp_path):
  def occupy(files):
    (tmp_path / "warm_start" / "12").mkdir()
    files.stop()

  with pytest.raises(
    checkpoint.Unsaved, match=r"after 12 of 12 .* not be saved"
  ):
    imitate(tmp_path, experiment(), during=occupy)


# Whole runs.


def train(run_dir, tree):
  data = {
    "overlap": overrides.to_json(tree.overlap),
    "rollout": {"group_size": tree.rollout.group_size},
  }
  (run_dir / "config.json").write_text(json.dumps(data))
  return local.train(tree, run_dir)


@pytest.mark.slow
def test_a_run_of_no_rounds_says_what_is_done_and_what_goes_on(
  tmp_path, capsys
):
  assert train(tmp_path, experiment()) == 0
  done = f"{tmp_path} has no rounds, and its warm start is done; launch.export"
  told = capsys.readouterr().out
  assert done in told
  assert "staleness" not in told
  assert not (tmp_path / "warm_start").exists()
  before = lines(tmp_path)
  assert train(tmp_path, experiment()) == 0
  told = capsys.readouterr().out
  assert "going on after the warm start" in told
  assert done in told
  # More rounds continue from it and do not repeat it.
  assert train(tmp_path, experiment(rounds=1)) == 0
  assert "warm start 1/" not in capsys.readouterr().out
  assert lines(tmp_path) == before
  assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.slow
def test_a_run_that_ends_before_its_first_checkpoint_keeps_its_warm_start(
  tmp_path, capsys
):
  # Steps of this size leave no finite number in the second round.
  wild = optimizers.AdamW(learning_rate=1e30)
  tree = experiment(optimizer=wild, rounds=4, max_skipped=0)
  assert train(tmp_path, tree) == 1
  assert workdir.checkpoints(tmp_path) == ["0"]
  capsys.readouterr()
  assert train(tmp_path, tree) == 1
  told = capsys.readouterr().out
  assert "going on after the warm start" in told
  assert "warm start 1/" not in told
  # The log counts the interrupted round and its repetition once.
  kinds = [
    json.loads(line)["kind"]
    for line in (tmp_path / "events.jsonl").read_text().splitlines()
    if line
  ]
  assert kinds.count("resumed") == 1
  assert told.count("error: ") == 1
  assert "gradient norm" in told


# Real processes.

OVERRIDES = {
  "warm_start.steps": "120",
  "warm_start.episodes": "4",
  "warm_start.checkpoint_every": "8",
  "warm_start.optimizer.schedule.decay_updates": "110",
  "model.num_experts": "0",
  "model.num_layers": "1",
  "model.d_model": "32",
  "batch.rows": "8",
  "engine.slots": "32",
  "engine.row_buckets": "32,",
  "engine.chunk_buckets": "8,",
  "evaluation.episodes": "4",
}


def start(run_dir):
  config = "configs/guess_number_sft.py"
  return commands.start(*commands.train(run_dir, OVERRIDES, config))


def finish(process):
  output, _ = process.communicate(timeout=machine_speed.scaled(240))
  return process.returncode, output


def wait_for_steps(run_dir, count, process):
  processes.until(
    lambda: processes.rounds(run_dir, "warm_start.jsonl") >= count, process
  )


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
  run_dir = tmp_path_factory.mktemp("uninterrupted")
  code, output = finish(start(run_dir))
  assert code == 0, output
  return run_dir


@pytest.mark.slow
def test_the_same_command_ends_bit_equal_after_signals(uninterrupted, tmp_path):
  process = start(tmp_path)
  wait_for_steps(tmp_path, 20, process)
  process.kill()
  assert finish(process)[0] == -signal.SIGKILL
  # Those after 8 and 16 steps; the later may not have been complete.
  assert workdir.checkpoints(tmp_path, workdir.WARM_START)
  process = start(tmp_path)
  wait_for_steps(tmp_path, 50, process)
  process.terminate()
  code, output = finish(process)
  assert code == 128 + signal.SIGTERM, output
  assert "going on after" in output
  assert "of 120 steps of the warm start; to go on:\n" in output
  assert "-m launch.train" in output
  assert not (tmp_path / "checkpoints" / "0").exists()
  code, output = finish(start(tmp_path))
  assert code == 0, output
  assert "of 120 steps of the warm start\n" in output
  assert "warm start 1/120" not in output
  assert learned(tmp_path) == learned(uninterrupted)
  params = processes.saved_params(uninterrupted, 0)
  assert processes.saved_params(tmp_path, 0) == params
  assert len(params) > 20
  rows = [
    json.loads((run_dir / "evaluations.jsonl").read_text())
    for run_dir in (tmp_path, uninterrupted)
  ]
  assert rows[0]["success"] == rows[1]["success"]
  assert not (tmp_path / "warm_start").exists()
