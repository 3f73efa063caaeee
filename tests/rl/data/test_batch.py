"""Packing: every token once, where it belongs, whatever the order."""

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
import pytest

from models import config as config_lib
from rl.data import batch
from tests.helpers import drawn_episodes as drawn

PLAIN = batch.Batch._fields[:8]


def _pack(episodes, values=None, *, share=False, **shape) -> list[Any]:
  """Returns batches, each token with the value of its episode; 1 by default."""
  values = [1.0] * len(episodes) if values is None else values
  packed = batch.pack(episodes, version=9, share_prompts=share, **shape)
  columns = [
    np.full(episode.num_sampled, value, np.float32)
    for episode, value in zip(episodes, values, strict=True)
  ]
  return batch.with_column(packed, "advantages", columns).batches


def _conversations(batches: list[Any]):
  """Yields the columns of each conversation, found from its last token."""
  rows = range(len(batches[0].tokens))
  for packed, row in itertools.product(batches, rows):
    segments, prefix = packed.segments[row], packed.prefix
    owned = set(segments.tolist()) - {0}
    if prefix is not None:
      owned -= set(prefix.parents[row].tolist())
    for segment in sorted(owned):
      at = [int(np.flatnonzero(segments == segment)[-1])]
      for _ in range(packed.positions[row, at[0]]):
        here = at[-1]
        at.append(here - 1 if prefix is None else prefix.previous[row, here])
      yield jax.tree.map(lambda x, at=at[::-1], row=row: x[row, at], packed)


def _num_rows(batches):
  return sum(int(packed.segments.any(1).sum()) for packed in batches)


def test_trajectories_lie_where_they_can_be_worked_out():
  # Lengths 3, 2, 4 in rows of 5: 4 opens row 0, 3 opens row 1, 2 joins it.
  episodes = [drawn.episode([(2, 1)], 10), drawn.episode([(1, 1)], 20)]
  episodes.append(drawn.episode([(1, 1), (1, 1)], 30))
  (packed,) = _pack(episodes, [0.5, -1.0, 2.0], rows=2, length=5)
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
  assert packed.lags.tolist() == [[0, 6, 0, 6, 0], [0, 0, 8, 0, 7]]
  # The sampler's log-probability is -id / 7 here, on sampled ids alone.
  own = np.array([[0, 31, 0, 33, 0], [0, 0, 12, 0, 21]])
  np.testing.assert_allclose(packed.behaviour, -own / 7, rtol=1e-6)
  optional = packed[len(PLAIN) :]
  assert optional == (None,) * 7


def test_a_shared_prompt_lies_once_before_the_rests_of_its_group():
  # Of group 1 remain 4 + 2 + 1 ids and the prompt 7 8 9: 3 + 7 of 12 places.
  # Group 2, of one, fills the row; a prompt that is not shared has no segment.
  prompt = [7, 8, 9]
  episodes = [
    drawn.episode([(3, 2)], 20, group=1, prompt=prompt),
    drawn.episode([(1, 1)], 60, group=2),
    drawn.episode([(3, 1)], 30, group=1, prompt=prompt),
    drawn.episode([(3, 2), (1, 1)], 40, group=1, prompt=prompt),
  ]
  values = [1.0, 2.0, 3.0, 4.0]
  (packed,) = _pack(episodes, values, share=True, rows=1, length=12)
  rows = {
    "tokens": [7, 8, 9, 43, 44, 45, 46, 23, 24, 33, 60, 61],
    "segments": [1, 1, 1, 2, 2, 2, 2, 3, 3, 4, 5, 5],
    "positions": [0, 1, 2, 3, 4, 5, 6, 3, 4, 3, 0, 1],
    "sampled": [0, 0, 0, 1, 1, 0, 1, 1, 1, 1, 0, 1],
    "advantages": [0, 0, 0, 4, 4, 0, 4, 1, 1, 3, 0, 2],
    "versions": [0, 0, 0, 4, 4, 0, 4, 2, 2, 3, 0, 6],
  }
  for name, row in rows.items():
    assert getattr(packed, name).astype(int).tolist() == [row], name
  own = np.array([[0, 0, 0, 43, 44, 0, 46, 23, 24, 33, 0, 61]])
  np.testing.assert_allclose(packed.behaviour, -own / 7, rtol=1e-6)
  parents, previous, copies = (x[0].tolist() for x in packed.prefix)
  assert parents == [-1, -1, -1, 1, 1, 1, 1, 1, 1, 1, -1, -1]
  # The first token of every rest comes after the prompt's last, at index 2.
  assert previous == [0, 0, 1, 2, 3, 4, 5, 2, 7, 2, 9, 10]
  assert copies == [3, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1]


def test_a_group_too_large_for_a_row_has_its_prompt_in_every_row_it_takes():
  # Rows of 6 hold the prompt of 2 and rests of 2 + 2; five members take three
  # rows, and the last has its prompt to itself.
  episodes = [
    drawn.episode([(2, 2)], 10 * i, prompt=[7, 8]) for i in range(1, 6)
  ]
  (packed,) = _pack(episodes, share=True, rows=3, length=6)
  assert packed.tokens.tolist() == [
    [7, 8, 12, 13, 22, 23],
    [7, 8, 32, 33, 42, 43],
    [7, 8, 52, 53, 0, 0],
  ]
  assert packed.prefix.copies.tolist() == [
    [2, 2, 1, 1, 1, 1],
    [2, 2, 1, 1, 1, 1],
    [1, 1, 1, 1, 0, 0],
  ]
  assert packed.segments[2].tolist() == [1, 1, 1, 1, 0, 0]


def test_prompts_of_other_ids_or_other_groups_are_not_shared():
  # Equal ids of another group, and a member whose environment said another
  # word: both keep their own prompt.
  episodes = [
    drawn.episode([(2, 1)], 10, group=1, prompt=[7, 8]),
    drawn.episode([(2, 1)], 20, group=2, prompt=[7, 8]),
    drawn.episode([(2, 1)], 30, group=1, prompt=[7, 9]),
    drawn.episode([(1, 2)], 40, group=1, prompt=[7]),
  ]
  (packed,) = _pack(episodes, share=True, rows=1, length=12)
  assert packed.tokens.tolist() == [[7, 8, 12, 7, 8, 22, 7, 9, 32, 7, 41, 42]]
  assert (packed.prefix.parents == -1).all()
  assert (packed.prefix.copies == 1).all()


def test_a_member_that_said_nothing_shares_its_prompt_and_adds_no_segment():
  # Aborted before its first token; unshared, its prompt would count as well.
  episodes = [
    drawn.episode([(2, 2)], 10, prompt=[7, 8]),
    drawn.episode([(2, 0)], 20, prompt=[7, 8]),
  ]
  (packed,) = _pack(episodes, share=True, rows=1, length=4)
  assert packed.tokens.tolist() == [[7, 8, 12, 13]]
  assert packed.segments.tolist() == [[1, 1, 2, 2]]
  assert packed.prefix.copies.tolist() == [[2, 2, 1, 1]]


def test_sharing_that_would_take_another_row_is_left():
  # On their own 3 + 2 and 3 + 2 fill two rows of 5. The pair with one prompt
  # would take 1 + 1 + 1 places of a row, which leave none for 3, nor 3 for 3.
  episodes = [
    drawn.episode([(1, 1)], 10, group=1, prompt=[7]),
    drawn.episode([(1, 1)], 20, group=1, prompt=[7]),
    drawn.episode([(1, 2)], 30, group=2),
    drawn.episode([(1, 2)], 40, group=3),
  ]
  (packed,) = _pack(episodes, share=True, rows=2, length=5)
  assert packed.tokens.tolist() == [[30, 31, 32, 7, 11], [40, 41, 42, 7, 21]]
  assert (packed.prefix.parents == -1).all()


@pytest.mark.parametrize("share", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("seed", range(20))
def test_every_token_is_packed_once_with_all_that_belongs_to_it(seed, share):
  draws = np.random.default_rng(seed)
  episodes = drawn.random_groups(draws)
  values = draws.normal(size=len(episodes)).astype(np.float32).tolist()
  batches = _pack(episodes, values, rows=4, length=25, share=share)
  by_id = {
    int(e.ids[-1]): (e, v) for e, v in zip(episodes, values, strict=True)
  }
  for packed in _conversations(batches):
    episode, value = by_id.pop(int(packed.tokens[-1]))
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
    assert (
      packed.lags.tolist() == np.where(own, 9 - packed.versions, 0).tolist()
    )
  assert not by_id
  for packed in batches:
    padding = packed.segments == 0
    assert not any(getattr(packed, name)[padding].any() for name in PLAIN)
  sampled = sum(int(packed.sampled.sum()) for packed in batches)
  assert sampled == sum(episode.num_sampled for episode in episodes)


@pytest.mark.parametrize("seed", range(20))
def test_copies_count_every_token_as_often_as_it_was_played(seed):
  draws = np.random.default_rng(seed)
  episodes = drawn.random_groups(draws)
  own = _pack(episodes, rows=4, length=25)
  shared = _pack(episodes, share=True, rows=4, length=25)
  copies = sum(int(packed.prefix.copies.sum()) for packed in shared)
  assert copies == sum(len(episode.ids) for episode in episodes)
  assert _num_rows(shared) <= _num_rows(own)
  for packed in shared:
    parents, previous, copies = packed.prefix
    assert (packed.prefix.copies > 0).tolist() == (packed.segments > 0).tolist()
    assert ((previous >= 0) & (previous < 25)).all()
    # A prompt lies before all that see it, and is nobody's answer.
    for row, at in np.argwhere(parents > 0):
      prompt = packed.segments[row] == parents[row, at]
      assert np.flatnonzero(prompt)[-1] < at
      assert not packed.sampled[row, prompt].any()
      assert (copies[row, prompt] > 1).all()


def test_the_same_arguments_pack_the_same_rows():
  episodes = drawn.random_groups(np.random.default_rng(0))
  for share in (False, True):
    once, twice = (
      _pack(episodes, rows=4, length=25, share=share) for _ in range(2)
    )
    assert len(once) == len(twice)
    assert jax.tree.all(jax.tree.map(np.array_equal, once, twice))


def test_experts_follow_their_tokens():
  # One of two sparse layers, two experts: token i took i, i + 1 and so on.
  episodes = [
    drawn.episode([(2, 1)], 10, prompt=[7, 8], experts=(2, 2)),
    drawn.episode([(2, 1), (1, 1)], 20, prompt=[7, 8], experts=(2, 2)),
    drawn.episode([(1, 1)], 30, group=1),
  ]
  (packed,) = _pack(episodes, share=True, rows=1, length=10)
  assert packed.tokens.tolist() == [[7, 8, 22, 23, 24, 12, 30, 31, 0, 0]]
  # -1 for the group that has none, and for padding.
  first = [7, 8, 22, 23, 24, 12, -1, -1, -1, -1]
  assert packed.experts.shape == (1, 10, 2, 2)
  assert packed.experts[0, :, 0, 0].tolist() == first
  last = [n + 3 if n >= 0 else -1 for n in first]
  assert packed.experts[0, :, 1, 1].tolist() == last


def test_a_shared_prompt_takes_the_experts_of_the_first_that_has_it():
  # The longer one comes first; its prompt was routed to 5, the other's to 6.
  episodes = [
    drawn.episode([(1, n)], 10 * n, prompt=[7], experts=(1, 1)) for n in (1, 2)
  ]
  for episode, expert in zip(episodes, (6, 5), strict=True):
    chosen: Any = episode.turns[0].experts
    chosen[0] = expert
  (packed,) = _pack(episodes, share=True, rows=1, length=4)
  assert packed.experts[0, :, 0, 0].tolist() == [5, 21, 22, 11]


def test_experts_lie_in_a_row_in_the_widest_dtype_of_its_trajectories():
  # int32, as in older files, beside those recorded for 128 and 129 experts.
  def recorded(num_experts, first_id):
    episode = drawn.episode([(1, 1)], first_id, experts=(1, 1))
    dtype = config_lib.tiny_moe(num_experts=num_experts).expert_dtype
    chosen: Any = episode.experts
    turn = dataclasses.replace(episode.turns[0], experts=chosen.astype(dtype))
    return dataclasses.replace(episode, turns=[turn])

  older, small, large = (
    drawn.episode([(1, 1)], 70_000, experts=(1, 1)),
    recorded(128, 126),
    recorded(129, 300),
  )
  none = drawn.episode([(1, 1)])
  for episodes, dtype, expected in (
    ([small, none], np.int8, [126, 127, -1, -1]),
    ([large, small], np.int16, [300, 301, 126, 127]),
    ([older, small], np.int32, [70_000, 70_001, 126, 127]),
  ):
    (packed,) = _pack(episodes, rows=1, length=4)
    assert packed.experts.dtype == dtype
    assert packed.experts[0, :, 0, 0].tolist() == expected


def test_experts_of_two_models_are_refused():
  episodes = [
    drawn.episode([(1, 1)], experts=shape) for shape in ((1, 2), (3, 2))
  ]
  with pytest.raises(ValueError, match=r"\[\(1, 2\), \(3, 2\)\] a token"):
    _pack(episodes, rows=1, length=4)


def test_rows_that_run_out_go_on_in_another_batch_of_the_same_shape():
  # Five episodes of 4 ids fill five rows of 4: two batches of 2 and one row.
  episodes = [drawn.episode([(1, 3)], 10 * i) for i in range(5)]
  batches = _pack(episodes, rows=2, length=4)
  assert [b.tokens.shape for b in batches] == [(2, 4)] * 3
  assert [int(b.sampled.sum()) for b in batches] == [6, 6, 3]
  # Of equal length, they keep their order.
  assert [b.tokens[:, 0].tolist() for b in batches] == [
    [0, 10],
    [20, 30],
    [40, 0],
  ]
  assert batches[-1].segments.tolist() == [[1] * 4, [0] * 4]


@pytest.mark.parametrize("share", [False, True], ids=["own", "shared"])
def test_a_trajectory_fills_a_row_to_its_last_place(share):
  (packed,) = _pack([drawn.episode([(1, 3)])], rows=1, length=4, share=share)
  assert packed.segments.tolist() == [[1, 1, 1, 1]]


@pytest.mark.parametrize("share", [False, True], ids=["own", "shared"])
def test_a_trajectory_longer_than_a_row_is_refused(share):
  episodes = [drawn.episode([(2, n)]) for n in (1, 3)]
  with pytest.raises(ValueError, match=r"5 tokens .* batch\.length=4; raise"):
    _pack(episodes, rows=1, length=4, share=share)


@pytest.mark.parametrize("share", [False, True], ids=["own", "shared"])
def test_nothing_packs_into_no_batch(share):
  packed = batch.pack([], rows=2, length=4, version=0, share_prompts=share)
  assert packed == batch.Packed([], [])
  assert batch.collect(batch.with_column(packed, "values", []), []) == []


def test_an_episode_without_ids_takes_no_place():
  episodes = [drawn.episode([]), drawn.episode([(1, 1)], 10)]
  (packed,) = _pack(episodes, [1.0, 2.0], rows=1, length=3)
  assert packed.tokens.tolist() == [[10, 11, 0]]
  assert packed.advantages.tolist() == [[0, 2, 0]]


def test_an_empty_batch_is_all_padding():
  experts = np.zeros((4, 2), np.int8)
  blank: Any = batch.empty(2, 3, share_prompts=True, experts=experts)
  for name in PLAIN:
    column = getattr(blank, name)
    assert column.shape == (2, 3)
    assert not column.any()
  assert blank.prefix.previous.tolist() == [[0, 0, 1]] * 2
  assert (blank.prefix.parents == -1).all()
  assert not blank.prefix.copies.any()
  assert blank.experts.shape == (2, 3, 4, 2)
  assert (blank.experts == -1).all()
  assert blank.experts.dtype == np.int8


@pytest.mark.parametrize("share", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("seed", range(5))
def test_states_are_those_before_each_token_and_after_the_last_id(seed, share):
  draws = np.random.default_rng(seed)
  episodes = [
    *drawn.random_groups(draws),
    drawn.episode([]),
    drawn.episode([(3, 0)]),
    drawn.episode([(2, 2), (3, 0)], 90_000),
  ]
  packed = batch.pack(
    episodes, rows=4, length=25, version=9, share_prompts=share
  )
  # The score of a state is the id that led there.
  read = batch.collect_states(
    packed, [b.tokens.astype(np.float32) for b in packed.batches]
  )
  for states, episode in zip(read, episodes, strict=True):
    if not episode.num_sampled:
      assert states.tolist() == [0]
      continue
    at = np.flatnonzero(episode.sampled)
    assert states.tolist() == episode.ids[[*(at - 1), -1]].tolist()


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


# Three full rows: a batch of two, and one of one or a row that has no place.
@pytest.mark.parametrize(
  ("settings", "rows", "last"),
  [({"tail_rows": 1}, [2, 1], (1, 0)), ({"only_full": True}, [2], None)],
  ids=["smaller", "left for later"],
)
def test_what_fills_no_batch_is_a_smaller_one_or_left(settings, rows, last):
  episodes = [drawn.episode([(1, 3)], 10 * i) for i in range(3)]
  packed = batch.pack(episodes, rows=2, length=4, version=0, **settings)
  assert [b.tokens.shape for b in packed.batches] == [(n, 4) for n in rows]
  places = [p and (p.batch, p.row) for p in packed.places]
  assert places == [(0, 0), (0, 1), last]
