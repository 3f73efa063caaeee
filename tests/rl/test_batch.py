"""Packing: every token once, where it belongs, whatever the order."""

import numpy as np
import pytest

from rl import batch, trajectory


def _episode(turns, first_id=0):
  """Returns an episode of (context, sampled) lengths with unique ids."""
  records, at = [], first_id
  for context, sampled in turns:
    ids = np.arange(at, at + context + sampled, dtype=np.int32)
    at += len(ids)
    own = ids[context:]
    records.append(
      trajectory.Turn(
        context=ids[:context],
        tokens=own,
        logprobs=(-own / 7).astype(np.float32),
        versions=own // 10,
        stop="stop",
      )
    )
  return trajectory.Trajectory(
    task_id="game/train/0",
    group_id=0,
    index=0,
    turns=records,
    status=trajectory.Status.COMPLETED,
    reward=0.0,
  )


def _random_episodes(draws, count):
  """Returns episodes of 1 to 4 turns, none longer than 24 ids."""
  episodes, at = [], 1
  for _ in range(count):
    turns = draws.integers(1, 4, size=(draws.integers(1, 5), 2))
    episodes.append(_episode(turns.tolist(), at))
    at += len(episodes[-1].ids)
  return episodes


def _segments(batches):
  """Yields the columns of each trajectory as it was packed."""
  for packed in batches:
    for row, segments in enumerate(packed.segments):
      for segment in range(1, segments.max() + 1):
        at = segments == segment
        yield batch.Batch(*(column[row][at] for column in packed))


def test_trajectories_lie_where_they_can_be_worked_out():
  # Lengths 3, 2, 4 in rows of 5: 4 opens row 0, 3 opens row 1, 2 joins it.
  episodes = [_episode([(2, 1)], 10), _episode([(1, 1)], 20)]
  episodes.append(_episode([(1, 1), (1, 1)], 30))
  (packed,) = batch.pack(episodes, [0.5, -1.0, 2.0], rows=2, length=5)
  assert packed.tokens.tolist() == [
    [30, 31, 32, 33, 0],
    [10, 11, 12, 20, 21],
  ]
  assert packed.segments.tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 2, 2]]
  assert packed.positions.tolist() == [[0, 1, 2, 3, 0], [0, 1, 2, 0, 1]]
  assert packed.sampled.astype(int).tolist() == [
    [0, 1, 0, 1, 0],
    [0, 0, 1, 0, 1],
  ]
  assert packed.advantages.tolist() == [[0, 2, 0, 2, 0], [0, 0, 0.5, 0, -1]]
  assert packed.versions.tolist() == [[0, 3, 0, 3, 0], [0, 0, 1, 0, 2]]
  # The sampler's log-probability is -id / 7 here, on sampled ids alone.
  own = np.array([[0, 31, 0, 33, 0], [0, 0, 12, 0, 21]])
  np.testing.assert_allclose(packed.behaviour, -own / 7, rtol=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_every_token_is_packed_once_with_all_that_belongs_to_it(seed):
  draws = np.random.default_rng(seed)
  episodes = _random_episodes(draws, count=30)
  values = draws.normal(size=30).astype(np.float32).tolist()
  batches = batch.pack(episodes, values, rows=4, length=25)
  by_id = {int(e.ids[0]): (e, v) for e, v in zip(episodes, values, strict=True)}
  for packed in _segments(batches):
    episode, value = by_id.pop(int(packed.tokens[0]))
    turns = episode.turns
    assert packed.tokens.tolist() == episode.ids.tolist()
    assert packed.positions.tolist() == list(range(len(episode.ids)))
    own = packed.sampled
    assert own.tolist() == episode.sampled.tolist()
    versions = np.concatenate([t.versions for t in turns])
    logprobs = np.concatenate([t.logprobs for t in turns])
    assert packed.versions[own].tolist() == versions.tolist()
    assert packed.behaviour[own].tobytes() == logprobs.tobytes()
    assert packed.advantages[own].tolist() == [value] * own.sum()
    assert not packed.advantages[~own].any()
    assert not packed.behaviour[~own].any()
  assert not by_id
  for packed in batches:
    padding = packed.segments == 0
    assert not any(column[padding].any() for column in packed)


def test_the_same_arguments_pack_the_same_rows():
  episodes = _random_episodes(np.random.default_rng(0), count=30)
  once, twice = (
    batch.pack(episodes, [1.0] * 30, rows=4, length=25) for _ in range(2)
  )
  assert len(once) == len(twice)
  for a, b in zip(once, twice, strict=True):
    assert all((x == y).all() for x, y in zip(a, b, strict=True))


def test_rows_that_run_out_go_on_in_another_batch_of_the_same_shape():
  # Five episodes of 4 ids fill five rows of 4: two batches of 2 and one row.
  episodes = [_episode([(1, 3)], 10 * i) for i in range(5)]
  batches = batch.pack(episodes, [1.0] * 5, rows=2, length=4)
  assert [b.tokens.shape for b in batches] == [(2, 4)] * 3
  assert [int(b.sampled.sum()) for b in batches] == [6, 6, 3]
  # Of equal length, they keep their order.
  assert [b.tokens[:, 0].tolist() for b in batches] == [
    [0, 10],
    [20, 30],
    [40, 0],
  ]
  assert batches[-1].segments.tolist() == [[1] * 4, [0] * 4]


def test_a_trajectory_fills_a_row_to_its_last_place():
  (packed,) = batch.pack([_episode([(1, 3)])], [1.0], rows=1, length=4)
  assert packed.segments.tolist() == [[1, 1, 1, 1]]


def test_a_trajectory_longer_than_a_row_is_refused():
  with pytest.raises(ValueError, match=r"5 tokens .* batch\.length=4; raise"):
    batch.pack([_episode([(1, 4)])], [1.0], rows=1, length=4)


def test_nothing_packs_into_no_batch():
  assert batch.pack([], [], rows=2, length=4) == []


def test_an_empty_batch_is_all_padding():
  blank = batch.empty(2, 3)
  assert all(column.shape == (2, 3) for column in blank)
  assert not any(column.any() for column in blank)
