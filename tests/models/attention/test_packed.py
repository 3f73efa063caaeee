"""Runs of packed rows, and what is asked of cuDNN, which a stand-in does."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from models import sharding
from models.attention import attention, backend, mask, packed

pytestmark = pytest.mark.compiled

ROWS = {
  "few": [[1, 1, 1, 2, 2, 3, 0, 0], [1, 2, 2, 2, 2, 2, 2, 3]],
  "one": [[1] * 8, [5] * 8],
  "padding": [[0] * 8, [1] + [0] * 7],
}
OTHERS = {
  "too many": [[1, 2, 3, 4, 5, 6, 6, 6], [1] * 8],
  "pieces": [[1, 1, 2, 2, 1, 1, 0, 0], [1] * 8],
  "padding first": [[0, 0, 1, 1, 1, 1, 2, 2], [1] * 8],
  "unseen": [[1, 1, 1, 1, -1, -1, -1, -1], [1] * 8],
}


@pytest.fixture(autouse=True)
def five(monkeypatch):
  monkeypatch.setattr(packed, "MAX_RUNS", 5)


@pytest.mark.parametrize("seed", range(5))
def test_runs_are_told_where_they_begin_and_how_long_they_are(seed):
  rng = np.random.default_rng(seed)
  segments = np.sort(rng.integers(1, 5, size=(3, 12)), 1).astype(np.int32)
  segments[0, 9:] = 0
  starts, lengths = packed.starts_and_lengths(packed.runs(jnp.array(segments)))
  assert starts.shape == (3, 6)
  assert lengths.shape == (3, 5)
  for row, ids in enumerate(segments):
    begins = [t for t in range(12) if t == 0 or ids[t] != ids[t - 1]]
    ends = [*begins[1:], 12]
    unused = 5 - len(begins)
    assert starts[row].tolist() == begins + [-1] * (unused + 1)
    sizes = [end - begin for begin, end in zip(begins, ends, strict=True)]
    assert lengths[row].tolist() == sizes + [-1] * unused


@pytest.mark.parametrize("name", [*ROWS, *OTHERS])
def test_only_few_runs_in_order_fit(name):
  segments = jnp.array({**ROWS, **OTHERS}[name], jnp.int32)
  assert bool(packed.fits(segments, packed.runs(segments))) == (name in ROWS)


def by_cudnn(
  query,
  key,
  value,
  *,
  q_seqlen,
  kv_seqlen,
  q_offsets,
  kv_offsets,
  scale,
  mask_type,
):
  """What cuDNN does with starts and lengths; nan where no run is."""
  assert mask_type is cudnn.MaskType.PADDING_CAUSAL
  at = jnp.arange(query.shape[1])[:, None]
  begins, sizes = q_offsets[:, None, :-1], q_seqlen[:, None]
  inside = (begins <= at) & (at < begins + sizes) & (sizes > 0)
  run = jnp.where(inside.any(2), inside.argmax(2), -1)
  seen = (run[:, :, None] == run[:, None]) & (at >= at.T)
  group = query.shape[2] // key.shape[2]
  k, v = (jnp.repeat(x, group, 2) for x in (key, value))
  scores = jnp.einsum("blhd,bshd->bhls", query, k) * scale
  weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf))
  out = jnp.einsum("bhls,bshd->blhd", weights, v)
  return jnp.where((run >= 0)[:, :, None, None], out, jnp.nan)


@pytest.mark.parametrize("name", [*ROWS, *OTHERS])
def test_rows_are_attended_to_as_by_the_reference(monkeypatch, name):
  asked = []

  def stand_in(*args, **kwargs):
    asked.append(kwargs)
    return by_cudnn(*args, **kwargs)

  monkeypatch.setattr(cudnn, "dot_product_attention", stand_in)
  monkeypatch.setattr(packed, "can", lambda case, layout: True)
  rng = np.random.default_rng(0)
  query, k, v, cotangent = (
    jnp.asarray(rng.normal(size=(2, 8, heads, 8)), jnp.float32)
    for heads in (4, 2, 2, 4)
  )
  token_mask = mask.packed_mask(jnp.array({**ROWS, **OTHERS}[name], jnp.int32))
  if name == "unseen":
    # Whatever the reference says of a query that sees nothing.
    cotangent = cotangent.at[0, 4:].set(0)

  @functools.partial(jax.jit, static_argnames="form")
  def run(args, form):
    def attend(query, k, v):
      source = mask.KeyValues(k, v, token_mask)
      return attention.attend(query, token_mask, [source], form=form)

    out, pull = jax.vjp(attend, *args)
    return out, pull(cotangent)

  found, expected = (run((query, k, v), f) for f in ("packed", "reference"))
  assert asked
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), found, expected
  )


CASE = backend.Case(
  batch=2,
  queries=64,
  keys=64,
  heads=4,
  head_dim=64,
  dtypes=frozenset({"bfloat16"}),
)


def test_a_device_without_the_kernel_goes_by_platform(monkeypatch):
  assert not packed.can(CASE, None)
  versions = {"new": (9, 0), "old": (8, 0)}
  for name, version in versions.items():
    monkeypatch.setattr(sharding, "nvidia_version", lambda _, v=version: v)
    assert packed.can(CASE, None) == (name == "new")


@pytest.mark.parametrize(
  "change",
  [
    {"dtypes": frozenset({"float32"})},
    {"head_dim": 192},
    {"parents": True},
    {"sources": 2},
    {"in_order": False},
    {"queries": 32},
  ],
  ids=str,
)
def test_what_the_kernel_does_not_know_goes_by_platform(monkeypatch, change):
  monkeypatch.setattr(sharding, "nvidia_version", lambda _: (9, 0))
  assert not packed.can(dataclasses.replace(CASE, **change), None)
