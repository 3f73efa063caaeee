"""Skipped updates, put away and taken out again."""

import dataclasses

import jax
import numpy as np
import pytest

from rl.algorithms import losses, objective
from rl.data import batch, segment_index
from rl.runtime import checkpoint
from rl.train import learner, optimizers, skipped_updates


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
EXPERTS = batch.empty(2, 8, share_prompts=True, experts=(3, 2))
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
  assert (found.version, found.number, found.zero_variance_count) == (
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
  "damage", ["gone", "empty", "cut", "no parameters", "owners"]
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
    case "owners":
      name = "owners.json"
      (path / name).write_text("[[1, 2]]")
    case "no parameters":
      name = "state"
      for part in (path / name).rglob("*"):
        if part.is_file():
          part.write_bytes(b"")
  with pytest.raises(skipped_updates.Unreadable, match=name):
    skipped_updates.read(path, programs.abstract)


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
