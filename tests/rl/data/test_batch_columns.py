"""Values by trajectory, to and from packed rows; rows of other shapes."""

from typing import Any

import numpy as np
import pytest

from rl.data import batch
from tests.helpers import drawn_episodes as drawn


@pytest.mark.parametrize("share", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("seed", range(20))
def test_what_is_written_by_trajectory_is_read_by_trajectory(seed, share):
  draws = np.random.default_rng(seed)
  episodes = [
    *drawn.random_groups(draws),
    drawn.episode([]),
    drawn.episode([(3, 0)]),
  ]
  packed = batch.pack(
    episodes, rows=4, length=25, version=9, share_prompts=share, shards=2
  )
  written = [
    draws.normal(size=episode.num_sampled).astype(np.float32)
    for episode in episodes
  ]
  after = batch.with_column(packed, "returns", written)
  columns: list[Any] = [b.returns for b in after.batches]
  read = batch.collect(after, columns)
  assert [x.tolist() for x in read] == [x.tolist() for x in written]
  for column, b in zip(columns, after.batches, strict=True):
    assert not column[~b.sampled].any()
  # The batches that it was made from are as they were.
  assert all(b.returns is None for b in packed.batches)


@pytest.mark.parametrize("share", [False, True], ids=["own", "shared"])
def test_places_are_those_of_the_sampled_tokens_in_order(share):
  episodes = drawn.random_groups(np.random.default_rng(1))
  packed = batch.pack(
    episodes, rows=4, length=25, version=9, share_prompts=share
  )
  for episode, place in zip(episodes, packed.places, strict=True):
    assert place is not None
    own = packed.batches[place.batch].tokens[place.row, place.index]
    assert own.tolist() == episode.ids[episode.sampled].tolist()


def test_one_without_ids_has_no_place_and_one_without_answer_an_empty_one():
  episodes = [
    drawn.episode([]),
    drawn.episode([(2, 0)]),
    drawn.episode([(1, 1)], 10),
  ]
  _, *rest = batch.pack(episodes, rows=1, length=4, version=0).places
  assert batch.pack(episodes, rows=1, length=4, version=0).places[0] is None
  # The longer one, of 2 ids, comes first; the other answers at index 3.
  assert [(p and p.row, p and p.index.tolist()) for p in rest] == [
    (0, []),
    (0, [3]),
  ]


def test_a_column_of_another_length_is_refused():
  packed = batch.pack([drawn.episode([(1, 2)])], rows=1, length=4, version=0)
  for own in ([1.0], [1.0, 2.0, 3.0]):
    with pytest.raises(ValueError, match=f"^{len(own)} values for the 2 samp"):
      batch.with_column(packed, "values", [np.array(own, np.float32)])


def test_the_rows_of_a_shard_lie_together():
  # Four rows and two shards: the costliest with the cheapest, 81 + 36 pairs,
  # and the two others, 64 + 49.
  episodes = [drawn.episode([(1, n)], 20 * n) for n in (8, 7, 6, 5)]
  (packed,) = batch.pack(
    episodes, rows=4, length=9, version=0, shards=2
  ).batches
  assert (packed.segments > 0).sum(1).tolist() == [9, 6, 8, 7]


def test_the_last_batches_may_be_smaller():
  # Three full rows: a batch of two, and one of one.
  episodes = [drawn.episode([(1, 3)], 10 * i) for i in range(3)]
  packed = batch.pack(episodes, rows=2, length=4, version=0, tail_rows=1)
  assert [b.tokens.shape for b in packed.batches] == [(2, 4), (1, 4)]
  assert [p and (p.batch, p.row) for p in packed.places] == [
    (0, 0),
    (0, 1),
    (1, 0),
  ]


def test_what_fills_no_batch_can_be_left_for_later():
  # Three full rows: a batch of two, and one row that has no place.
  episodes = [drawn.episode([(1, 3)], 10 * i) for i in range(3)]
  packed = batch.pack(episodes, rows=2, length=4, version=0, only_full=True)
  assert [b.tokens.shape for b in packed.batches] == [(2, 4)]
  assert [p and p.row for p in packed.places] == [0, 1, None]
