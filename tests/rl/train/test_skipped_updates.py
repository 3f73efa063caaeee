"""Skipped updates, put away and taken out again."""

import dataclasses
import functools
import os
from typing import Any, Literal

import jax
import numpy as np
import pytest

from models import config as model_config
from rl.algorithms import losses, objective
from rl.audit import token_ledger
from rl.data import batch, segment_index
from rl.pools import placement
from rl.runtime import checkpoint
from rl.schedule import overlap
from rl.testing import fakes
from rl.train import learner, optimizers, skipped_updates
from tests.helpers import scored_episodes, virtual_run
from tests.helpers import tiny_engine as tiny

pytestmark = pytest.mark.compiled


def _programs(config, layout, critic=False):
  goal = objective.Objective(loss=losses.ClippedSurrogate())
  return learner.Learner(
    config, layout, goal, optimizers.AdamW()(), critic=critic
  )


@pytest.fixture(scope="module")
def programs(dense_config, one_device):
  return _programs(dense_config, one_device)


@pytest.fixture(scope="module")
def state(programs):
  return programs.init(jax.random.key(0))


def _random(packed, seed):
  """The same batch with other numbers in every column, nan among them."""
  rng = np.random.default_rng(seed)

  def filled(column):
    values = rng.integers(0, 2, column.shape).astype(column.dtype)
    if values.dtype == np.float32:
      values[0, 1], values[1, 0] = np.nan, np.inf
    return values

  return jax.tree.map(filled, packed)


PLAIN = batch.empty(2, 8)
SHARED = batch.empty(2, 8, share_prompts=True)
EXPERTS = batch.empty(
  2, 8, share_prompts=True, experts=np.zeros((3, 2), np.int8)
)
FULL = SHARED._replace(
  **dict.fromkeys(("old", "reference", "values", "returns"), PLAIN.behaviour)
)
SOME = PLAIN._replace(old=PLAIN.behaviour)


@pytest.mark.parametrize(
  "packed",
  [PLAIN, SHARED, EXPERTS, FULL, SOME],
  ids=["plain", "prefix", "experts", "all columns", "old only"],
)
def test_every_column_comes_back_bit_by_bit(tmp_path, programs, state, packed):
  batches = [_random(packed, 0), _random(packed, 1)]
  kept = skipped_updates.Quarantine(tmp_path)
  whose = [segment_index.Owner(1, 0, 2, "game/train/7", 5, 3)]
  path = kept.keep(state, batches, 11, 3, 2.5, whose)
  assert path == tmp_path / "round_000012_update_3"
  found = skipped_updates.read(path, programs.abstract)
  assert (found.version, found.number, found.left_out_divisor) == (
    11,
    3,
    2.5,
  )
  # Version 11 is what round 12 trains.
  assert (found.round, found.owners) == (12, whose)
  assert jax.tree.structure(found.batches) == jax.tree.structure(batches)
  for ours, theirs in zip(
    jax.tree.leaves(found.batches), jax.tree.leaves(batches), strict=True
  ):
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(ours, theirs)


def test_the_parameters_that_the_batches_met_come_back(
  tmp_path, dense_config, one_device
):
  programs = _programs(dense_config, one_device, critic=True)
  state = programs.init(jax.random.key(1))
  params = jax.tree.map(lambda x: x.at[:1].set(np.nan), state.params)
  state = state._replace(params=params)
  path = skipped_updates.Quarantine(tmp_path).keep(state, [PLAIN], 0, 0)
  found = skipped_updates.read(path, programs.abstract)
  for ours, theirs in (
    (found.params, state.params),
    (found.critic, state.critic),
  ):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_the_newest_updates_are_kept(tmp_path, state):
  kept = skipped_updates.Quarantine(tmp_path, most=2)
  paths = [kept.keep(state, [PLAIN], version, 0) for version in (7, 8, 3)]
  # 3 is the newest though not the latest round: a run went on from before it.
  assert skipped_updates.updates(tmp_path) == paths[1:]
  assert sorted(tmp_path.iterdir()) == sorted(paths[1:])


def test_an_update_that_is_met_again_takes_the_place_of_the_first(
  tmp_path, programs, state
):
  kept = skipped_updates.Quarantine(tmp_path)
  kept.keep(state, [PLAIN, PLAIN], 5, 1)
  path = kept.keep(state, [_random(PLAIN, 4)], 5, 1)
  assert skipped_updates.updates(tmp_path) == [path]
  (found,) = skipped_updates.read(path, programs.abstract).batches
  np.testing.assert_array_equal(found.behaviour, _random(PLAIN, 4).behaviour)


def test_a_crash_on_the_way_leaves_nothing_that_looks_like_an_update(
  tmp_path, programs, state, monkeypatch
):
  kept = skipped_updates.Quarantine(tmp_path)

  def dies(*args):
    raise KeyboardInterrupt

  with monkeypatch.context() as patched:
    patched.setattr(checkpoint.Checkpoints, "save", dies)
    with pytest.raises(KeyboardInterrupt):
      kept.keep(state, [PLAIN], 5, 1)
  assert skipped_updates.updates(tmp_path) == []
  assert not [*tmp_path.glob("round_*")]
  path = kept.keep(state, [PLAIN], 6, 0)
  assert [*tmp_path.iterdir()] == [path]
  assert len(skipped_updates.read(path, programs.abstract).batches) == 1


@pytest.mark.parametrize(
  "damage",
  ["gone", "empty", "cut", "a pipe", "no parameters", "owners", "deep owners"],
)
def test_what_is_damaged_is_named(tmp_path, programs, state, damage):
  path = skipped_updates.Quarantine(tmp_path).keep(state, [PLAIN], 5, 1)
  file, name = path / skipped_updates.BATCHES, skipped_updates.BATCHES
  match damage:
    case "gone":
      file.unlink()
    case "empty":
      file.write_bytes(b"")
    case "cut":
      file.write_bytes(file.read_bytes()[:-40])
    case "a pipe":
      file.unlink()
      os.mkfifo(file)
    case "owners" | "deep owners":
      name = "owners.json"
      deep = damage == "deep owners"
      (path / name).write_text("[" * 100_000 if deep else "[[1, 2]]")
    case "no parameters":
      name = "state"
      for part in (path / name).rglob("*"):
        if part.is_file():
          part.write_bytes(b"")
  with pytest.raises(skipped_updates.Unreadable, match=name):
    skipped_updates.read(path, programs.abstract)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"0/tokens": np.zeros((2, 3), np.int32)}, r"the shape \(.*must be \[rows"),
    ({"0/tokens": np.int32(1)}, r"and tokens \(\); all must be"),
    ({"0/behaviour": np.zeros(3, np.float32)}, "behaviour has the shape"),
    ({"0/tokens": PLAIN.tokens * 1.0}, "tokens has the type float64; it must"),
    ({"0/sampled": PLAIN.tokens}, "sampled has the type int32"),
    ({"0/more": PLAIN.tokens}, "unexpected keyword argument"),
    ({"9/tokens": PLAIN.tokens}, "missing 8 required"),
    ({"0/prefix/parents": PLAIN.tokens}, "missing 2 required"),
    ({"0/tokens": np.array([None])}, "allow_pickle"),
  ],
)
def test_columns_that_are_no_batch_are_refused(
  tmp_path, programs, changes, message
):
  columns = {f"0/{x}": y for x, y in batch.columns(PLAIN).items()}
  np.savez(tmp_path / skipped_updates.BATCHES, **(columns | changes))
  with pytest.raises(skipped_updates.Unreadable, match=message) as error:
    skipped_updates.read(tmp_path, programs.abstract)
  assert str(tmp_path / skipped_updates.BATCHES) in str(error.value)


def test_an_archive_that_grows_is_not_unpacked(tmp_path, programs, monkeypatch):
  monkeypatch.setattr(skipped_updates, "_MAX_BYTES", 999)
  zeros: Any = {"0/tokens": np.zeros(99_999, np.int8)}
  np.savez_compressed(tmp_path / skipped_updates.BATCHES, **zeros)
  with pytest.raises(skipped_updates.Unreadable, match="are more than 999"):
    skipped_updates.read(tmp_path, programs.abstract)


def test_an_update_of_another_model_is_refused(
  tmp_path, state, dense_config, one_device
):
  path = skipped_updates.Quarantine(tmp_path).keep(state, [PLAIN], 5, 1)
  wide = dataclasses.replace(dense_config, d_ff=32)
  with pytest.raises(checkpoint.Mismatch):
    skipped_updates.read(path, _programs(wide, one_device).abstract)


def test_a_quarantine_that_keeps_nothing_is_refused(tmp_path):
  with pytest.raises(ValueError, match="most=0 keeps no update; use 1"):
    skipped_updates.Quarantine(tmp_path, most=0)


def test_an_update_of_an_older_run_has_no_owners(tmp_path, programs, state):
  path = skipped_updates.Quarantine(tmp_path).keep(state, [PLAIN], 5, 1)
  (path / "owners.json").unlink()
  assert list(skipped_updates.read(path, programs.abstract).owners) == []


def test_the_updates_of_one_round_are_found_in_their_order(tmp_path, state):
  kept = skipped_updates.Quarantine(tmp_path, most=9)
  for version, number in ((4, 10), (4, 2), (40, 2), (5, 0)):
    kept.keep(state, [PLAIN], version, number)
  found = skipped_updates.of_round(tmp_path, 5)
  assert [x.name for x in found] == [
    "round_000005_update_2",
    "round_000005_update_10",
  ]
  assert skipped_updates.of_round(tmp_path, 7) == []


CONFIG = tiny.DENSE
Dtype = Literal["float32", "bfloat16"]
# Master copies and the critic are what a state may have on top.
KINDS = [
  pytest.param("float32", False, id="float32"),
  pytest.param("bfloat16", True, id="bfloat16-critic"),
]


@functools.cache
def build(dtype: Dtype, critic: bool) -> learner.Learner:
  layout, _ = placement.Placement(
    learner=placement.MeshSpec(data=2), colocated=True
  ).layouts()
  return learner.Learner(
    dataclasses.replace(CONFIG, compute=model_config.Compute(dtype=dtype)),
    layout,
    objective.Objective(loss=losses.ClippedSurrogate()),
    optimizers.AdamW(learning_rate=0.02)(),
    critic=critic,
  )


@functools.cache
def good() -> batch.Batch:
  episodes = scored_episodes.draw(2)
  (packed,) = scored_episodes.pack(episodes, rows=8, length=32).batches
  return packed


def with_nan() -> batch.Batch:
  """One token in all whose advantage is not known."""
  values = good().advantages.copy()
  values[tuple(np.argwhere(good().sampled)[5])] = np.nan
  return good()._replace(advantages=values)


def lost() -> batch.Batch:
  """One token whose log-probability is not known."""
  values = np.array(good().old)
  values[tuple(np.argwhere(good().sampled)[7])] = np.nan
  return good()._replace(old=values)


def impossible() -> batch.Batch:
  """One token that no engine could have sampled."""
  values = np.array(good().old)
  values[
    tuple(np.argwhere(good().sampled & (good().advantages < 0))[0])
  ] = -np.inf
  return good()._replace(old=values)


def steep() -> batch.Batch:
  """Squares of gradients overflow, of a loss that does not."""
  return good()._replace(advantages=np.float32(1e25) * good().advantages)


def boundless() -> batch.Batch:
  """Every token is clipped, so it has no gradient, and the loss overflows."""
  # A policy that knows nothing gives each of 24 ids -3.2 nats: ratios of e and
  # more, which times 1e38 just fit, but no two of them together.
  huge = np.where(good().sampled, np.float32(1e38), np.float32(0))
  far = np.where(good().sampled, np.float32(-4.2), np.float32(0))
  return good()._replace(advantages=huge, old=far)


def step(
  programs: learner.Learner, state: Any, data: batch.Batch
) -> tuple[Any, dict[str, float]]:
  total = programs.accumulate(
    state.params, None, programs.place(data), state.critic
  )
  state, metrics = programs.update(state, total)
  return state, {k: float(x) for k, x in jax.device_get(metrics).items()}


def assert_same_bits(found: Any, expected: Any) -> None:
  jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(
  ("bad", "loss_is_finite", "norm_is_finite"),
  [
    (with_nan, False, False),
    (lost, False, False),
    (steep, True, False),
    (boundless, False, True),
  ],
)
@pytest.mark.parametrize(("dtype", "critic"), KINDS)
def test_a_bad_batch_changes_not_one_bit_and_the_next_one_trains(
  dtype: Dtype, critic, bad, loss_is_finite, norm_is_finite
):
  programs = build(dtype, critic)
  # After a step moments are not 0, and master copies no rounded numbers.
  state, _ = step(programs, programs.init(jax.random.key(0)), good())
  before = jax.device_get(state)
  state, metrics = step(programs, state, bad())
  assert metrics["skipped"] == 1
  assert np.isfinite(metrics["loss"]) == loss_is_finite
  assert np.isfinite(metrics["grad_norm"]) == norm_is_finite
  assert_same_bits(jax.device_get(state), before)
  state, metrics = step(programs, state, good())
  assert metrics["skipped"] == 0
  after = jax.device_get(state)
  assert (before.updates, after.updates) == (1, 2)
  assert (after.master is None) == (dtype == "float32")
  assert (after.critic is None) != critic
  moved = jax.tree.map(lambda a, b: (a != b).any(), after, before)
  assert all(jax.tree.leaves(moved))


def test_a_log_probability_of_minus_infinity_is_a_bounded_ratio():
  """Its token is clipped or pushes no further; the others are trained."""
  programs = build("float32", False)
  state = programs.init(jax.random.key(0))
  state, metrics = step(programs, state, impossible())
  assert metrics["skipped"] == 0
  assert np.isfinite(metrics["grad_norm"])
  assert metrics["grad_norm"] > 0
  for leaf in jax.tree.leaves(jax.device_get(state)):
    assert np.isfinite(leaf).all()


class Skipping(fakes.FakeLearner):
  """A learner of which some updates are not finite.

  Attributes:
    bad: which of each two.
  """

  def __init__(self, bad):
    super().__init__()
    self.bad, self.taken = bad, 0

  def update(self, state, total, left_out_divisor=0.0):
    after, sums = super().update(state, total, left_out_divisor)
    bad = self.taken % 2 in self.bad
    self.taken += 1
    return (state, {**sums, "skipped": 1.0}) if bad else (after, sums)


@pytest.mark.parametrize(
  ("bad", "updates", "share"),
  [((), 2, 0.0), ((1,), 1, 0.5), ((0,), 0, 1.0)],
  ids=["none", "second", "first"],
)
def test_tokens_of_which_one_step_was_taken_are_booked_as_trained(
  bad, updates, share
):
  # Two epochs an update, of which some are not finite.
  run = virtual_run.Run(
    overlap.sync(4), rounds=1, programs=Skipping(bad), packing={"epochs": 2}
  ).start()
  assert run.state.updates == updates
  assert [m["skipped_updates"] for m in run.observer.metrics] == [share]
  ledger = token_ledger.of(run.log.events)
  assert ledger.error == 0
  # Four groups of two, whose members say a word and its end in each of two
  # turns: all of it was trained, or none.
  counts = (ledger.trained, ledger.masked)
  assert counts == ((0, 32) if share == 1 else (32, 0))
  assert dict(ledger.causes) == ({"not finite": 32} if share == 1 else {})
