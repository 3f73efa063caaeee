"""Trajectories come in one by one; every one is accumulated once, and whole."""

import asyncio
from typing import Any

import numpy as np
import pytest

from rl.data import batch
from rl.runtime import mesh_thread, trace
from rl.testing import fakes
from rl.train import scoring, trainer
from tests.helpers import scored_episodes

EPISODES = scored_episodes.draw(4)
ROWS, LENGTH = 2, 20


class Programs(fakes.FakeLearner):
  """A learner that keeps what it is called with."""

  def __init__(self):
    super().__init__()
    self.batches: list[batch.Batch] = []
    self.params: list[Any] = []
    self.counts: list[float] = []

  def accumulate(self, params, total, batch, critic=None):
    assert critic is None
    self.params.append(params["updates"])
    self.batches.append(batch)
    return super().accumulate(params, total, batch, critic)

  def update(self, state, total, zero_variance_count=0.0):
    self.counts.append(zero_variance_count)
    return super().update(state, total, zero_variance_count)


def run(scenario, *, share_prompts=False, tail_rows=None):
  """Returns what the scenario does, and what the learner was told."""
  programs = Programs()
  thread = mesh_thread.MeshThread("learner", trace.Trace(None))

  def pack(members, *, only_full=False):
    return batch.pack(
      members,
      rows=ROWS,
      length=LENGTH,
      version=scored_episodes.VERSION,
      share_prompts=share_prompts,
      tail_rows=tail_rows,
      only_full=only_full,
    )

  this = trainer.Accumulation(programs, thread, pack)
  try:
    return asyncio.run(scenario(this, programs.abstract)), programs
  finally:
    thread.close()


def part(start, stop):
  columns: dict[batch.Column, scoring.Tokens] = {
    name: own[start:stop] for name, own in EPISODES.columns.items()
  }
  return EPISODES.members[start:stop], columns


def tokens(batches):
  """What each sampled token carries, in an order of its own."""
  names = ("tokens", "positions", "behaviour", *scored_episodes.COLUMNS)
  return sorted(
    tuple(float(getattr(b, name)[row, at]) for name in names)
    for b in batches
    for row, at in zip(*np.nonzero(b.sampled), strict=True)
  )


def expected():
  whole = scored_episodes.pack(EPISODES, rows=ROWS, length=LENGTH)
  return tokens(whole.batches)


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("step", [1, 3, 16])
def test_every_token_is_accumulated_once_with_all_that_is_known_of_it(
  step, share_prompts
):
  async def scenario(this, state):
    for start in range(0, len(EPISODES.members), step):
      await this.add(state, *part(start, start + step))
    await this.flush(state)
    return this.batches

  batches, kept = run(scenario, share_prompts=share_prompts)
  assert len(expected()) == sum(EPISODES.sizes)
  assert tokens(kept.batches) == expected()
  assert [id(b) for b in batches] == [id(b) for b in kept.batches]


@pytest.mark.parametrize("share_prompts", [False, True])
def test_every_trajectory_owns_the_segment_in_which_its_tokens_lie(
  share_prompts,
):
  async def scenario(this, state):
    for start in range(len(EPISODES.members)):
      await this.add(state, *part(start, start + 1))
    await this.flush(state)
    return this

  this, _ = run(scenario, share_prompts=share_prompts)
  found = {(owner.group, owner.member): owner for owner in this.owners}
  assert len(found) == len(this.owners) == len(EPISODES.members)
  for member in EPISODES.members:
    owner = found[member.group_id, member.index]
    packed = this.batches[owner.batch]
    own = packed.sampled[owner.row]
    own = own & (packed.segments[owner.row] == owner.segment)
    np.testing.assert_array_equal(
      packed.tokens[owner.row][own], member.ids[member.sampled]
    )


def test_what_fills_no_batch_waits_for_others():
  async def scenario(this, state):
    counts = []
    for start in range(len(EPISODES.members)):
      await this.add(state, *part(start, start + 1))
      counts.append(len(this.batches))
    return counts, this

  (counts, this), _ = run(scenario)
  assert counts[0] == 0
  assert counts == sorted(counts)
  # Full batches alone: every row holds something.
  assert all((b.segments > 0).any(1).all() for b in this.batches)
  assert counts[-1] > 1


def test_the_rest_makes_a_smaller_batch_where_that_leaves_less_empty():
  async def scenario(this, state):
    await this.add(state, *part(0, 1))
    await this.flush(state)

  _, kept = run(scenario, tail_rows=1)
  assert [b.tokens.shape for b in kept.batches] == [(1, LENGTH)]
  _, kept = run(scenario)
  assert [b.tokens.shape for b in kept.batches] == [(ROWS, LENGTH)]


def test_a_second_epoch_has_the_same_batches_and_newer_weights():
  async def scenario(this, state):
    await this.add(state, *part(0, 16))
    await this.flush(state)
    state, first = await this.step(state, 3.0)
    await this.repeat(state)
    _, second = await this.step(state, 3.0)
    return first["tokens"], second["tokens"]

  sums, kept = run(scenario)
  half = len(kept.batches) // 2
  assert [id(b) for b in kept.batches[:half]] == [
    id(b) for b in kept.batches[half:]
  ]
  assert kept.params == [0] * half + [1] * half
  assert kept.counts == [3.0, 3.0]
  # Each starts from nothing.
  assert sums == (sum(EPISODES.sizes),) * 2


def test_a_flush_of_nothing_does_nothing():
  async def scenario(this, state):
    await this.flush(state)
    return this.batches

  assert run(scenario)[0] == []
