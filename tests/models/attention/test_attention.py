"""Every form of attention against float64 softmaxes, and against each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import sharding
from models.attention import attention, mask

pytestmark = pytest.mark.compiled

FORMS = ("reference", "fused", "blockwise", "splash", "triton")
ANY_TOKENS = ("reference", "fused", "blockwise")
LENGTH = 128  # a row of splash, and two tiles of triton
# Segments of each row; 0 is padding. Tiles of 48 divide none of it.
SEGMENTS = (((1, 40), (2, 71), (0, 17)), ((1, 5), (2, 100), (3, 23)))

needs_devices = pytest.mark.skipif(
  jax.device_count() < 8, reason="needs 8 devices"
)


def draw(*shape, seed=0, dtype=jnp.float32):
  # Of numpy, as slices of it are no programs.
  return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def tokens(batch, length, heads=4, kv_heads=2, width=8, **kwargs):
  """Returns queries, keys and values."""
  return [
    draw(batch, length, num, width, seed=seed, **kwargs)
    for seed, num in enumerate((heads, kv_heads, kv_heads))
  ]


def segment_ids(rows=SEGMENTS):
  ids = [[i for i, size in row for _ in range(size)] for row in rows]
  return jnp.asarray(np.array(ids, np.int32))


def whole(q, k, v, token_mask, form, **kwargs):
  """Attention of rows to themselves, in tiles of 48."""
  source = mask.KeyValues(k, v, token_mask)
  options = {"form": form, "block": 48} | kwargs
  return attention.attend(q, token_mask, [source], **options)


def softmax(q, k, v, sees):
  """Float64, one query and head at a time; sees(row, query, key)."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  out, group = np.zeros_like(q), q.shape[2] // k.shape[2]
  for b, t, h in np.ndindex(q.shape[:3]):
    keys = [s for s in range(k.shape[1]) if sees(b, t, s)]
    scores = k[b, keys, h // group] @ q[b, t, h] / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max())
    out[b, t, h] = weights / weights.sum() @ v[b, keys, h // group]
  return out


def pull_back(attend, args, cotangent):
  """Returns the result, and gradients of q, k and v."""
  out, pull = jax.vjp(attend, *args)
  return out, *pull(cotangent)


@functools.partial(
  jax.jit, static_argnames=("form", "block", "window", "layout")
)
def gradients(args, token_mask, cotangent, form, **options):
  """`pull_back` of `whole`, as one program for all tests of one shape."""
  attend = functools.partial(whole, token_mask=token_mask, form=form, **options)
  return pull_back(attend, args, cotangent)


def by_halves(args, token_mask, cotangent, form):
  """`gradients` of four rows, by the program of two."""
  rows = args, token_mask, cotangent
  halves = [
    gradients(*jax.tree.map(lambda x, at=at: np.asarray(x)[at], rows), form)
    for at in (np.s_[:2], np.s_[2:])
  ]
  return [np.concatenate(pair) for pair in zip(*halves, strict=True)]


def assert_close(actual, expected, rtol):
  """Within `rtol` of the largest value."""
  actual, expected = np.asarray(actual), np.asarray(expected)
  assert np.isfinite(actual).all()
  bound = rtol * np.abs(expected).max()
  np.testing.assert_allclose(actual, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("form", FORMS)
def test_a_token_mixes_what_came_before_it_in_its_segment(form, wrap):
  q, k, v = map(jnp.asarray, tokens(2, LENGTH))
  segments = segment_ids()
  ids = np.asarray(segments)
  attend = wrap(
    lambda q, k, v, segments: whole(q, k, v, mask.packed_mask(segments), form)
  )
  expected = softmax(q, k, v, lambda b, t, s: s <= t and ids[b, s] == ids[b, t])
  assert_close(attend(q, k, v, segments), expected, 2e-6)


@pytest.mark.parametrize("form", FORMS[1:])
def test_gradients_are_those_of_the_reference(form):
  args = tokens(2, LENGTH)
  token_mask = mask.packed_mask(segment_ids())
  cotangent = draw(*args[0].shape, seed=9)
  actual, expected = (
    gradients(args, token_mask, cotangent, f) for f in (form, "reference")
  )
  for a, e in zip(actual, expected, strict=True):
    assert_close(a, e, 1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_a_packed_row_is_its_segments_one_by_one(form):
  args = tokens(1, LENGTH)
  row = SEGMENTS[0]
  token_mask = mask.packed_mask(segment_ids([row]))
  cotangent = draw(*args[0].shape, seed=9)
  packed = jax.device_get(gradients(args, token_mask, cotangent, form))
  start = 0
  for _, size in row:
    at = np.s_[:, start : start + size]
    alone = mask.packed_mask(jnp.ones((1, size), jnp.int32))
    expected = gradients(
      [x[at] for x in args], alone, cotangent[at], "reference"
    )
    for a, e in zip(packed, expected, strict=True):
      assert_close(a[at], e, 1e-5)
    start += size


@pytest.mark.parametrize("form", FORMS)
def test_huge_values_of_other_segments_and_of_the_future_do_not_leak(form):
  q, k, v = tokens(1, LENGTH)
  segments = segment_ids([((1, 40), (2, 60), (0, 28))])
  # The last token of segment 2, all of segment 1 and of padding.
  at = np.r_[0:40, 99:128]
  planted = [q, k.copy(), v.copy()]
  planted[1][:, at], planted[2][:, at] = 1e30, -1e30
  seen = np.s_[:, 40:99]
  cotangent = np.zeros_like(q)
  cotangent[seen] = draw(1, 59, 4, 8, seed=9)
  token_mask = mask.packed_mask(segments)
  clean, dirty = (
    jax.device_get(gradients(x, token_mask, cotangent, form))
    for x in ([q, k, v], planted)
  )
  for a, e in zip(dirty, clean, strict=True):
    np.testing.assert_array_equal(a[seen], e[seen])


def within(token_mask, places, size):
  """Returns the mask, of queries that see the last tokens alone."""
  places = jnp.asarray(places, jnp.int32)
  return token_mask._replace(places=places, oldest=places - size + 1)


@pytest.mark.parametrize("form", [*ANY_TOKENS, "splash"])
def test_a_window_leaves_out_what_is_further_back(form):
  q, k, v = tokens(2, LENGTH)
  segments = segment_ids()
  index = np.arange(LENGTH)
  # Half of the tiles of 8 that are neither later nor of other segments.
  token_mask = within(mask.packed_mask(segments), [index, index], 20)
  attend = functools.partial(gradients, [q, k, v], token_mask, q)
  out, *grads = attend(form, block=8, window=20)
  ids = np.asarray(segments)
  expected = softmax(
    *(q, k, v),
    lambda b, t, s: t - 20 < s <= t and ids[b, s] == ids[b, t],
  )
  assert_close(out, expected, 2e-6)
  for a, e in zip(grads, attend("reference")[1:], strict=True):
    assert_close(a, e, 1e-5)


def test_a_layer_without_the_window_of_others_sees_everything():
  args, token_mask = tokens(2, LENGTH), mask.packed_mask(segment_ids())
  index = np.arange(LENGTH)
  far = within(token_mask, [index, index], mask.NO_WINDOW)
  cotangent = draw(*args[0].shape, seed=9)
  found = gradients(args, far, cotangent, "splash", window=20)
  for a, e in zip(
    found, gradients(args, token_mask, cotangent, "reference"), strict=True
  ):
    assert_close(a, e, 1e-5)


def test_tiles_before_a_window_are_not_read():
  q, k, v = tokens(1, 64)
  index = np.arange(64)[None]
  alone = mask.packed_mask(jnp.ones((1, 64), jnp.int32))
  token_mask = within(alone, index, 9)
  k[:, :16] = np.nan
  q, k, v = map(jnp.asarray, (q, k, v))
  out = whole(q, k, v, token_mask, "blockwise", block=8)
  # The tile from 24 on sees from 16 on.
  assert np.isfinite(out[:, 24:]).all()
  assert np.isnan(out[:, 23]).any()


@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize("form", ANY_TOKENS)
def test_members_that_share_a_prompt_are_as_with_a_prompt_each(form, size):
  # Segment 1 is the prompt, 2 and 3 go on from it, 4 stands alone.
  sizes, parents = (7, 9, 6, 5), (-1, 1, 1, -1)
  numbers = np.repeat([1, 2, 3, 4], sizes)
  args = tokens(1, numbers.size)
  cotangent = draw(*args[0].shape, seed=9)
  token_mask = mask.packed_mask(
    jnp.array([numbers], jnp.int32),
    jnp.array([np.repeat(parents, sizes)], jnp.int32),
  )
  places = np.r_[:7, 7:16, 7:13, :5]
  if size is not None:
    token_mask = within(token_mask, [places], size)
  shared = jax.device_get(gradients(args, token_mask, cotangent, form, block=4))
  total = [np.zeros_like(x) for x in shared]
  for number, parent in zip((2, 3, 4), parents[1:], strict=True):
    at = np.flatnonzero((numbers == number) | (numbers == parent))
    alone = mask.packed_mask(jnp.ones((1, at.size), jnp.int32))
    if size is not None:
      alone = within(alone, [places[at]], size)
    # The prompt's own output is asked for once, not by every member.
    own = (numbers[at] == number) | (number == 2)
    out, *grads = jax.device_get(
      gradients(
        [x[:, at] for x in args],
        alone,
        cotangent[:, at] * own[:, None, None],
        "reference",
      )
    )
    total[0][:, at[own]] = out[:, own]
    for summed, grad in zip(total[1:], grads, strict=True):
      summed[:, at] += grad
  for a, e in zip(shared, total, strict=True):
    assert_close(a, e, 1e-5)


@pytest.mark.parametrize("form", ANY_TOKENS)
def test_a_cache_and_fresh_tokens_are_as_whole_rows(form):
  args = tokens(2, 24)
  cotangent = draw(*args[0].shape, seed=9)
  token_mask = mask.packed_mask(jnp.ones((2, 24), jnp.int32))
  expected = jax.device_get(gradients(args, token_mask, cotangent, "reference"))
  # 17 tokens are in a cache of 20, the other 7 are fresh, in another order.
  done, order = 17, np.array([3, 0, 6, 1, 5, 2, 4])
  fresh = done + order
  room = jnp.pad(jnp.ones((2, done), jnp.int32), ((0, 0), (0, 3)))
  past = mask.TokenMask(
    jnp.tile(jnp.arange(20, dtype=jnp.int32), (2, 1)), room - (room == 0)
  )
  new = mask.TokenMask(
    jnp.tile(jnp.asarray(fresh, jnp.int32), (2, 1)),
    jnp.ones((2, 7), jnp.int32),
  )

  def attend(q, k, v):
    padded = [jnp.pad(x[:, :done], ((0, 0), (0, 3), (0, 0), (0, 0)))
              for x in (k, v)]  # fmt: skip
    sources = [
      mask.KeyValues(padded[0], padded[1], past),
      mask.KeyValues(k[:, fresh], v[:, fresh], new),
    ]
    return attention.attend(q[:, fresh], new, sources, form=form, block=6)

  out, *grads = jax.device_get(
    jax.jit(functools.partial(pull_back, attend))(args, cotangent[:, fresh])
  )
  assert_close(out, expected[0][:, fresh], 1e-5)
  # dq of the fresh; dk and dv miss what the old queries added.
  assert_close(grads[0][:, fresh], expected[1][:, fresh], 1e-5)
  assert_close(grads[1][:, fresh], expected[2][:, fresh], 1e-5)
  assert_close(grads[2][:, fresh], expected[3][:, fresh], 1e-5)


@pytest.mark.parametrize("form", ANY_TOKENS)
def test_one_token_alone_gets_its_own_value(form):
  q, k, v = tokens(3, 1)
  token_mask = mask.packed_mask(jnp.ones((3, 1), jnp.int32))
  out, dq, _, dv = gradients([q, k, v], token_mask, q, form)
  # Heads 0 and 1 read kv head 0, heads 2 and 3 read kv head 1.
  np.testing.assert_allclose(out, np.repeat(v, 2, 2), rtol=1e-6)
  np.testing.assert_allclose(dq, 0, atol=1e-6)
  summed = np.asarray(q).reshape(3, 1, 2, 2, 8).sum(3)
  np.testing.assert_allclose(dv, summed, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_errs_by_its_own_rounding_only(form):
  args = tokens(2, LENGTH, dtype=jnp.bfloat16)
  token_mask = mask.packed_mask(segment_ids())
  cotangent = draw(*args[0].shape, seed=9, dtype=jnp.bfloat16)
  actual = gradients(args, token_mask, cotangent, form)
  expected = gradients(
    [x.astype(jnp.float32) for x in args],
    token_mask,
    cotangent.astype(jnp.float32),
    "reference",
  )
  for a, e in zip(actual, expected, strict=True):
    assert a.dtype == jnp.bfloat16
    # A rounding of 2^-9 in each of a few steps; scores are float32.
    assert_close(a.astype(jnp.float32), e, 0.01)


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_a_scale_has_the_gradient_of_all_tokens(wrap):
  # 16,384 tokens: a sum in bfloat16 stops at 256 times an addend.
  x = jnp.asarray(draw(16, 1024, 8, dtype=jnp.bfloat16))

  def loss(scale):
    normed = attention.rms_norm(x, scale, 1e-6).astype(jnp.float32)
    return jnp.sum(normed * jnp.sign(x))

  found = wrap(jax.grad(loss))(jnp.ones(8, jnp.bfloat16))
  wide = np.asarray(x, np.float64)
  exact = np.abs(wide) / np.sqrt(np.mean(wide**2, -1, keepdims=True) + 1e-6)
  assert found.dtype == jnp.bfloat16
  # Rounded once, by 2^-8.
  np.testing.assert_allclose(
    np.asarray(found, float), exact.sum((0, 1)), rtol=2**-8
  )


@pytest.mark.parametrize("kv_heads", [1, 4], ids=["one", "all"])
@pytest.mark.parametrize("form", FORMS)
def test_any_number_of_heads_shares_a_kv_head(form, kv_heads):
  q, k, v = tokens(1, LENGTH, kv_heads=kv_heads)
  token_mask = mask.packed_mask(jnp.ones((1, LENGTH), jnp.int32))
  expected = softmax(q, k, v, lambda b, t, s: s <= t)
  out = jax.jit(functools.partial(whole, token_mask=token_mask, form=form))(
    q, k, v
  )
  assert_close(out, expected, 2e-6)


def mesh_layout(data, expert, tensor, **rules):
  mesh = sharding.make_mesh(data, expert, tensor)
  return sharding.Layout(mesh, sharding.Rules(**rules))


@needs_devices
@pytest.mark.parametrize("form", FORMS)
def test_a_mesh_gathers_nothing_and_changes_nothing(form):
  layout = mesh_layout(2, 2, 2)
  args = tokens(4, LENGTH)
  token_mask = mask.packed_mask(segment_ids(SEGMENTS + SEGMENTS))
  cotangent = draw(*args[0].shape, seed=9)
  expected = by_halves(args, token_mask, cotangent, form)
  wide = layout.sharding("batch", None, "heads", None)
  placed = (
    jax.device_put(args, wide),
    jax.device_put(token_mask, layout.sharding("batch")),
    jax.device_put(cotangent, wide),
  )
  program = gradients.lower(*placed, form=form, layout=layout).compile()
  for a, e in zip(program(*placed), expected, strict=True):
    assert a.sharding.shard_shape(a.shape)[::2] == (1, a.shape[2] // 2)
    assert_close(a, e, 1e-6)
  text = program.as_text() or ""
  assert "dot" in text
  for collective in ("all-gather", "all-reduce", "all-to-all", "permute"):
    assert f" {collective}" not in text


@needs_devices
@pytest.mark.parametrize(
  ("form", "size"),
  [
    ("reference", None),
    ("blockwise", None),
    ("fused", None),
    ("blockwise", 30),
  ],
)
def test_devices_that_share_a_row_agree_with_one(form, size):
  layout = sharding.Layout(sharding.make_mesh(data=2, tensor=2, context=2))
  args = tokens(4, LENGTH)
  token_mask = mask.packed_mask(segment_ids(SEGMENTS + SEGMENTS))
  if size is not None:
    token_mask = within(token_mask, [range(LENGTH)] * 4, size)
  expected = by_halves(args, token_mask, args[0], form)
  actual = gradients(args, token_mask, args[0], form, layout=layout)
  for a, e in zip(actual, expected, strict=True):
    assert_close(a, e, 2e-6)
  attend = functools.partial(
    whole, token_mask=token_mask, form=form, layout=layout
  )
  wide = layout.sharding("batch", "length", "heads", None)
  program = jax.jit(attend).lower(*jax.device_put(args, wide)).compile()
  out = program(*jax.device_put(args, wide))
  assert out.sharding.shard_shape(out.shape)[1] == LENGTH // 2
  # Keys and values come to the queries; these never leave their device.
  text = program.as_text() or ""
  comes = " collective-permute" if form == "blockwise" else " all-gather"
  assert comes in text
  assert (" all-gather" in text) == (form != "blockwise")
  assert " all-to-all" not in text


@needs_devices
@pytest.mark.parametrize(
  "layout_args",
  [((1, 1, 8), {}), ((8, 1, 1), {}), ((2, 1, 4), {"kv_heads": None})],
  ids=["heads", "rows", "rules"],
)
def test_axes_that_the_mesh_does_not_divide_stay_whole(layout_args):
  layout = mesh_layout(*layout_args[0], **layout_args[1])
  args = tokens(3, 10)
  token_mask = mask.packed_mask(jnp.ones((3, 10), jnp.int32))
  run = functools.partial(gradients, form="blockwise", block=4)
  expected = run(args, token_mask, args[0])
  actual = run(args, token_mask, args[0], layout=layout)
  for a, e in zip(actual, expected, strict=True):
    assert_close(a, e, 1e-6)


@pytest.mark.parametrize(
  ("form", "platform"),
  [("blockwise", "cuda"), ("blockwise", "tpu"), ("fused", "tpu")],
)
def test_a_form_lowers_for_accelerators(form, platform):
  args = tokens(1, LENGTH, dtype=jnp.bfloat16)
  token_mask = mask.packed_mask(jnp.ones((1, LENGTH), jnp.int32))
  attend = functools.partial(whole, token_mask=token_mask, form=form)
  loss = jax.jit(jax.grad(lambda *args: attend(*args).sum(), (0, 1, 2)))
  text = loss.trace(*args).lower(lowering_platforms=(platform,)).as_text()
  assert "dot_general" in text


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["fused", "triton"])
def test_a_kernel_of_the_gpu_agrees_with_the_reference(form):
  args = tokens(2, LENGTH, width=64, dtype=jnp.bfloat16)
  token_mask = mask.packed_mask(segment_ids())
  cotangent = draw(*args[0].shape, seed=9, dtype=jnp.bfloat16)
  actual, expected = (
    gradients(args, token_mask, cotangent, f) for f in (form, "reference")
  )
  for a, e in zip(actual, expected, strict=True):
    assert_close(a.astype(jnp.float32), e.astype(jnp.float32), 0.02)


def test_a_form_that_cannot_is_refused_and_not_chosen():
  q, k, v = map(jnp.asarray, tokens(1, LENGTH))
  alone = jnp.ones((1, LENGTH), jnp.int32)
  shared = mask.packed_mask(alone, alone * mask.NO_PARENT)
  with pytest.raises(
    ValueError, match=r"attention='splash' knows no shared prompts; use auto"
  ):
    whole(q, k, v, shared, "splash")
  token_mask = mask.packed_mask(alone)
  with pytest.raises(ValueError, match="needs one dtype and got bfloat16, f"):
    whole(q.astype(jnp.bfloat16), k, v, token_mask, "fused")
  with pytest.raises(ValueError, match="'flash' is unknown; use auto, packed"):
    whole(q, k, v, token_mask, "flash")
  ordered = token_mask._replace(positions=mask.positions(token_mask))
  with pytest.raises(ValueError, match="order of their indices"):
    whole(q, k, v, ordered, "splash")
  np.testing.assert_allclose(
    whole(q, k, v, shared, "auto"),
    whole(q, k, v, ordered, "reference"),
    atol=1e-6,
  )
