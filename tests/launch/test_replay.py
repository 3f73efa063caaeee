"""launch.replay: finds the nan in the skipped updates of a run."""

import dataclasses
import json
import pathlib
import sys

import jax
import numpy as np
import pytest

from launch import replay
from launch.cli import flags, workdir
from launch.run import local
from rl import assemble
from rl.settings import overrides
from rl.train import skipped_updates
from tests.helpers import commands

pytestmark = pytest.mark.compiled

EXPERIMENT = flags.load(
  str(commands.ROOT / commands.CONFIG),
  {
    "rounds": "12",
    "model.num_layers": "1",
    "model.d_model": "16",
    "model.d_expert": "16",
    "model.num_heads": "2",
    "model.head_dim": "8",
    "rollout.group_size": "4",
    "engine.slots": "16",
    "engine.row_buckets": "16,",
    "engine.chunk_buckets": "8,",
    "overlap.groups_per_round": "4",
    "overlap.groups_per_microbatch": "2",
    "batch.rows": "8",
    "warm_start": "none",
    "evaluation.episodes": "0",
    "retention.checkpoint_every": "1",
    # The first step is taken; all later losses are nan.
    "optimizer.learning_rate": "1e30",
  },
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
  path: pathlib.Path
  code: int
  told: str
  warned: str
  code_again: int
  told_again: str


@pytest.fixture(scope="module")
def wild(tmp_path_factory):
  """A run with steps of 1e30, started twice."""
  path = tmp_path_factory.mktemp("runs") / "wild"
  told, warned = path.with_name("told.txt"), path.with_name("warned.txt")

  def train():
    with (
      told.open("w") as file,
      warned.open("w") as errors,
      pytest.MonkeyPatch.context() as patched,
    ):
      patched.setattr(sys, "stdout", file)
      patched.setattr(sys, "stderr", errors)
      with workdir.claim(path, EXPERIMENT):
        code = local.train(EXPERIMENT, path)
    return code, told.read_text()

  code, first = train()
  complaints = warned.read_text()
  again, second = train()
  return _Run(
    path=path,
    code=code,
    told=first,
    warned=complaints,
    code_again=again,
    told_again=second,
  )


def test_a_run_without_finite_gradients_ends_with_a_line(wild):
  assert wild.code == 1
  last = skipped_updates.updates(wild.path / "skipped")[-1]
  assert "round 4: updates in a row" in wild.told
  assert "not finite: 3, and max_skipped=2 allows no more" in wild.told
  assert "Traceback" not in wild.told
  assert f"python -m launch.replay {last.parent}/round_" in wild.told
  # Tokens of skipped updates count as masked.
  assert "error 0" in wild.told
  log = (wild.path / "events.jsonl").read_text().splitlines()
  events = [json.loads(line) for line in log if line]
  trained = [event for event in events if event["kind"] == "trained"]
  skipped = [event for event in trained if not event["tokens"]]
  assert skipped
  assert all(event["masked"] > 0 for event in skipped)
  assert all(event["used"] == [] for event in skipped)
  assert all(event["skipped"] for event in skipped)
  assert not any(event.get("skipped") for event in trained if event["tokens"])


def test_each_skipped_update_is_warned_of_as_it_happens(wild):
  # Rewards that are all alike have a warning of their own.
  lines = [x for x in wild.warned.splitlines() if "an update was skipped" in x]
  skipped = wild.path / "skipped"
  # The time of day comes first.
  assert [
    line.split(" ", 1)[1][: len("warning: round 2: ")] for line in lines
  ] == [
    "warning: round 2: ",
    "warning: round 3: ",
  ]
  for number, line in zip((2, 3), lines, strict=True):
    command = f"python -m launch.replay {skipped}/round_00000{number}_update_0"
    assert line.endswith(command)


def test_metrics_directories_and_messages_number_rounds_alike(wild):
  rows = (wild.path / "metrics.jsonl").read_text().splitlines()
  found = [json.loads(row) for row in rows]
  skipped = [x["round"] for x in found if x["skipped_updates"]]
  # It continued after round 3, and ended in round 6 again.
  assert skipped == [2, 3, 4, 5]
  names = [x.name for x in skipped_updates.updates(wild.path / "skipped")]
  # The last three are kept; older ones are removed.
  assert names == [f"round_00000{number}_update_0" for number in (4, 5, 6)]
  assert "round 6: updates in a row" in wild.told_again
  assert "round  3/12" in wild.told


def test_the_ledger_and_the_report_tell_what_was_skipped(wild):
  assert " not finite) + " in wild.told
  assert f"report: {wild.path}/report.html" in wild.told
  page = (wild.path / "report.html").read_text()
  assert "Updates were skipped" in page
  assert "python -m launch.replay" in page


def test_a_run_without_finite_gradients_can_be_gone_on_with(wild):
  assert "going on after" in wild.told_again
  # Its weights have not changed.
  assert wild.code_again == 1
  assert "not finite: 3" in wild.told_again


@pytest.mark.slow
def test_a_skipped_update_is_replayed_from_the_command_line(wild):
  path = skipped_updates.updates(wild.path / "skipped")[-1]
  done = commands.launch("launch.replay", path, "--where")
  assert done.returncode == 1, done.stderr
  lines = done.stdout.splitlines()
  assert any(x.startswith("parameters: ") for x in lines)
  assert any(x.startswith("update: ") and "NOT FINITE" in x for x in lines)
  # Bad weights: the gradient of every row is not finite.
  assert "every row: look at the parameters, not the data" in lines
  assert len(lines) < 16
  assert "first operation with a nan: " in lines[-1]
  assert "models/" in lines[-1]


@pytest.mark.process
def test_a_mistyped_update_is_answered_with_the_nearest(wild):
  path = skipped_updates.updates(wild.path / "skipped")[-1]
  done = commands.run("launch.replay", str(path)[:-1] + "7")
  assert done.returncode == 2
  assert "is not a skipped update; did you mean" in done.stderr
  assert str(path) in done.stderr


def test_a_run_in_place_of_an_update_is_answered_with_what_it_has(wild):
  path = skipped_updates.updates(wild.path / "skipped")[-1]
  for wrong in (wild.path, wild.path / "skipped"):
    with pytest.raises(overrides.SettingError, match=f"did you mean .*{path}"):
      replay.resolve(str(wrong))


def test_a_mistyped_directory_on_the_way_is_named(wild):
  path = str(skipped_updates.updates(wild.path / "skipped")[-1])
  for part, wrong in (("/skipped/", "/skiped/"), ("/wild/", "/wlid/")):
    right = path.partition(part)[0] + part[:-1]
    with pytest.raises(
      overrides.SettingError, match=f"did you mean {right}\\?"
    ):
      replay.resolve(path.replace(part, wrong))


def test_where_there_is_no_update_at_all_its_form_is_told(tmp_path):
  with pytest.raises(overrides.SettingError, match="RUN/skipped/round_0000"):
    replay.resolve(str(tmp_path / "nowhere" / "at_all"))


def test_an_update_that_cannot_be_read_is_refused(wild, tmp_path):
  (tmp_path / skipped_updates.BATCHES).write_bytes(b"cut")
  with pytest.raises(overrides.SettingError, match="cannot be read"):
    replay.read(tmp_path, EXPERIMENT)


# The tests below plant values in an update of a sound run.


@pytest.fixture(scope="module")
def programs():
  layout = EXPERIMENT.placement.layouts()[0]
  return assemble.learner_programs(EXPERIMENT, layout)


@pytest.fixture
def sound(wild, programs):
  """Micro-batches of the run with finite weights and columns."""
  path = skipped_updates.updates(wild.path / "skipped")[0]
  _, kept = replay.read(path, EXPERIMENT)
  batches = [
    packed._replace(
      behaviour=np.where(packed.sampled, -1.5, 0).astype(np.float32),
      advantages=np.where(packed.sampled, 0.5, 0).astype(np.float32),
      old=None,
    )
    for packed in kept.batches
  ]
  params = programs.init(jax.random.key(0)).params
  return kept._replace(batches=batches, params=params)


def _told(programs, kept, **options):
  lines = []
  return replay.replay(programs, kept, lines.append, **options), lines


def test_an_update_that_is_finite_by_now_is_said_to_be(programs, sound):
  code, lines = _told(programs, sound, where=True)
  assert code == 0
  assert lines[-1].startswith("update: ")
  assert lines[-1].endswith(": finite")


def test_row_and_trajectory_of_a_planted_number_are_named(programs, sound):
  packed = sound.batches[0]
  row, index = np.argwhere(packed.sampled)[-1].tolist()
  segment = int(packed.segments[row, index])
  packed.advantages[row, index] = np.nan
  code, lines = _told(programs, sound)
  assert code == 1
  found = [x for x in lines if x.startswith(("  row ", "    segment "))]
  assert len(found) == 2
  assert found[0].startswith(f"  row {row}: ")
  assert found[1].startswith(f"    segment {segment} (group ")
  (owner,) = [x for x in sound.owners if x[:3] == (0, row, segment)]
  member = f"group {owner.group} member {owner.member}"
  assert f"({member} of guess_number/train/" in found[1]
  at = f"in micro-batch 0 row {row} segment {segment} index {index}"
  assert sum(f"not finite: 1, first {at}" in x for x in lines) == 1


def test_rows_that_fail_beside_finite_ones_are_all_named(programs, sound):
  good = sound.batches[0]
  bad = good._replace(advantages=np.full_like(good.advantages, np.nan))
  code, lines = _told(programs, sound._replace(batches=[good, bad]))
  assert code == 1
  rows = int(bad.sampled.any(1).sum())
  assert sum(x.startswith("  row ") for x in lines) == rows > 1
  assert not any(x.startswith("every row") for x in lines)


def test_parameters_that_are_no_numbers_are_named(programs, sound):
  params = {**sound.params}
  params["final_norm"] = params["final_norm"].at[0].set(np.nan)
  code, lines = _told(programs, sound._replace(params=params))
  assert code == 1
  assert "parameters: not finite: policy/final_norm; " in lines[1]


def test_a_norm_that_overflows_is_told_from_a_gradient_that_does(
  programs, sound
):
  # 1e25 squared is beyond float32.
  packed = sound.batches[0]
  advantages = np.where(packed.sampled, 1e25, 0).astype(np.float32)
  batches = [packed._replace(advantages=advantages)]
  code, lines = _told(programs, sound._replace(batches=batches))
  assert code == 1
  assert any("their norm overflows" in x for x in lines)
  # Every row overflows alone, so no row is searched.
  assert lines[-1] == (
    "every row: look at what the data has as advantages, not the parameters"
  )


def test_batches_that_overflow_only_together_are_told(programs, sound):
  packed = sound.batches[0]
  row, index = np.argwhere(packed.sampled)[0].tolist()
  at = np.zeros(packed.sampled.shape, bool)
  at[row, index] = True
  # A clipped ratio of 0.8: the loss of one is 1.6e38, and that of three is
  # beyond float32, while the gradient is 0.
  advantages = np.where(at, -2e38, 0).astype(np.float32)
  one = packed._replace(advantages=advantages)
  code, lines = _told(programs, sound._replace(batches=[one, one, one]))
  assert code == 1
  assert any("update: loss inf, gradient norm 0" in x for x in lines)
  assert sum(x.startswith("micro-batch ") for x in lines) == 3
  assert "only together they are not" in lines[-1]


def test_the_config_of_a_run_is_that_of_its_skipped_updates(wild):
  path = skipped_updates.updates(wild.path / "skipped")[0]
  stored = json.loads((path.parents[1] / "config.json").read_text())
  assert overrides.from_json(stored).max_skipped == EXPERIMENT.max_skipped
