"""Learning rates, worked out; optimizers against NumPy, from the papers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rl.settings import checks
from rl.train import optimizers

pytestmark = pytest.mark.compiled

AdamW = optimizers.AdamW
Adafactor = optimizers.Adafactor
Muon = optimizers.Muon
ConstantRate = optimizers.ConstantRate
LinearRate = optimizers.LinearRate
CosineRate = optimizers.CosineRate
HALF = 0.5**0.5
ALL = [AdamW, Adafactor, Muon]


def _draws(*shape, scale=1.0, seed=0):
  return scale * np.random.default_rng(seed).normal(size=shape)


def _steps(optimizer, params, gradients):
  """Returns the changes of as many updates as there are gradients."""
  transformation = optimizer()
  params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
  state, changes = transformation.init(params), []
  for gradient in gradients:
    gradient = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), gradient)
    change, state = jax.jit(transformation.update)(gradient, state, params)
    params = optax.apply_updates(params, change)
    changes.append(jax.device_get(change))
  return changes


def _adam(gradients, b1, b2, eps=1e-8):
  """Yields steps at a rate of 1, downhill."""
  mean = square = 0.0
  for t, gradient in enumerate(gradients, 1):
    mean = b1 * mean + (1 - b1) * gradient
    square = b2 * square + (1 - b2) * gradient**2
    yield -(mean / (1 - b1**t)) / (np.sqrt(square / (1 - b2**t)) + eps)


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize(
  ("schedule", "expected"),
  [
    (ConstantRate(), [1, 1, 1, 1, 1, 1, 1]),
    (ConstantRate(warmup_updates=1), [1, 1, 1, 1, 1, 1, 1]),
    (ConstantRate(warmup_updates=4), [0.25, 0.5, 0.75, 1, 1, 1, 1]),
    # From 1 to 0.2 in four equal steps.
    (LinearRate(decay_updates=4, end=0.2), [1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2]),
    # The second update has the peak, and four later it is at the end.
    (
      LinearRate(warmup_updates=2, decay_updates=4, end=0.0),
      [0.5, 1, 0.75, 0.5, 0.25, 0, 0],
    ),
    # The second and two more have it, and two later it is at the end.
    (
      LinearRate(warmup_updates=2, hold_updates=2, decay_updates=2, end=0.0),
      [0.5, 1, 1, 1, 0.5, 0, 0],
    ),
    # (1 + cos(0, 45, 90, 135 and 180 degrees)) / 2.
    (
      CosineRate(decay_updates=4, end=0.0),
      [1, (1 + HALF) / 2, 0.5, (1 - HALF) / 2, 0, 0, 0],
    ),
    # Halfway between 1 and 0.5 after two of four.
    (CosineRate(warmup_updates=3, decay_updates=2, end=0.5),
     [1 / 3, 2 / 3, 1, 0.75, 0.5, 0.5, 0.5]),
  ],
)  # fmt: skip
def test_the_rate_is_this_share_of_the_highest(wrap, schedule, expected):
  schedule.validate()
  factors = [wrap(schedule)(jnp.int32(n)) for n in range(7)]
  np.testing.assert_allclose(factors, expected, atol=1e-6)


@pytest.mark.parametrize(
  ("schedule", "message"),
  [
    (
      ConstantRate(warmup_updates=-1),
      r"constant_rate\.warmup_updates=-1 must be at least 0; use 0",
    ),
    (
      LinearRate(decay_updates=0),
      r"linear_rate\.decay_updates=0 must be at least 1; use the upd",
    ),
    (
      LinearRate(hold_updates=-1, decay_updates=1),
      r"linear_rate\.hold_updates=-1 must be at least 0; use 0",
    ),
    (
      CosineRate(decay_updates=1, end=1.5),
      r"cosine_rate\.end=1\.5 must be in .* share of the peak",
    ),
    (
      CosineRate(decay_updates=1, end=-0.5),
      r"cosine_rate\.end=-0\.5 must be in",
    ),
    (
      LinearRate(decay_updates=1, end=float("nan")),
      r"linear_rate\.end=nan must be in",
    ),
    (
      LinearRate(decay_updates=1, warmup_updates=-2),
      r"warmup_updates=-2 must be at least 0",
    ),
  ],
)
def test_a_schedule_that_cannot_work_is_refused(schedule, message):
  with pytest.raises(ValueError, match=message):
    schedule.validate()


@pytest.mark.parametrize(
  ("warmup", "expected"),
  [(0, [1, 1, 1, 1, 1, 1]), (1, [1] * 6), (4, [0.25, 0.5, 0.75, 1, 1, 1])],
)
def test_the_rate_warms_up_linearly(warmup, expected):
  optimizer = AdamW(
    learning_rate=0.5,
    schedule=ConstantRate(warmup_updates=warmup),
    max_grad_norm=1e9,
  )
  # For a constant gradient each step of Adam is the rate, against the sign.
  changes = _steps(optimizer, 0.0, [3.0] * 6)
  np.testing.assert_allclose(np.array(changes) / -0.5, expected, rtol=1e-4)


def test_adamw_takes_the_steps_of_its_paper():
  # Algorithm 2 of arXiv 1711.05101: the decay is not part of the moments.
  params, rate, decay = _draws(3, 4), 0.1, 0.2
  gradients = [_draws(3, 4, seed=n) for n in range(1, 6)]
  optimizer = AdamW(
    learning_rate=rate, b1=0.8, b2=0.9, weight_decay=decay, max_grad_norm=1e9
  )
  changes = _steps(optimizer, params, gradients)
  for change, step in zip(changes, _adam(gradients, 0.8, 0.9), strict=True):
    expected = rate * (step - decay * params)
    np.testing.assert_allclose(change, expected, rtol=1e-5, atol=1e-7)
    params = params + expected


def _adafactor(params, gradients, *, rate, factored):
  """Yields the changes of algorithms 4 and 5 of arXiv 1804.04235."""
  row = column = square = 0.0
  for t, gradient in enumerate(gradients, 1):
    kept = 1 - t**-0.8
    squared = gradient**2 + 1e-30
    if factored:
      row = kept * row + (1 - kept) * squared.mean(-1)
      column = kept * column + (1 - kept) * squared.mean(-2)
      # The paper has sums: R C / sum(R), which is this, by the row's length.
      second = np.outer(row, column) / row.mean()
    else:
      second = square = kept * square + (1 - kept) * squared
    step = gradient / np.sqrt(second)
    step /= max(1.0, np.sqrt((step**2).mean()))
    change = -rate * max(1e-3, np.sqrt((params**2).mean())) * step
    yield change
    params = params + change


@pytest.mark.parametrize(
  ("least", "factored"), [(4, True), (5, False)], ids=["factored", "whole"]
)
def test_adafactor_takes_the_steps_of_its_paper(least, factored):
  params = _draws(4, 6, scale=0.3)
  gradients = [_draws(4, 6, scale=10.0**n, seed=n) for n in range(4)]
  optimizer = Adafactor(
    learning_rate=0.5, least_factored=least, max_grad_norm=1e9
  )
  changes = _steps(optimizer, params, gradients)
  expected = list(_adafactor(params, gradients, rate=0.5, factored=factored))
  np.testing.assert_allclose(changes, expected, rtol=2e-5, atol=1e-7)


def test_adafactor_decays_by_the_rate():
  optimizer = Adafactor(learning_rate=0.5, weight_decay=0.1)
  params = _draws(3)
  plain = _steps(Adafactor(learning_rate=0.5), params, [_draws(3, seed=1)])
  decayed = _steps(optimizer, params, [_draws(3, seed=1)])
  np.testing.assert_allclose(
    decayed[0] - plain[0], -0.5 * 0.1 * params, rtol=1e-4
  )


@pytest.mark.parametrize(
  "optimizer",
  [AdamW(), Adafactor(least_factored=2), Adafactor(), Muon()],
  ids=["adamw", "factored", "adafactor", "muon"],
)
def test_stacked_layers_step_as_if_each_were_alone(optimizer):
  # Their sizes differ, so that a mean over all of them would show.
  def layer(seed, size):
    return {
      "attention_norm": _draws(4, scale=size, seed=seed),
      "attention": {
        "query": _draws(4, 2, 3, scale=size, seed=seed),
        "query_bias": _draws(2, 3, scale=size, seed=seed),
      },
      "moe": {"gate": _draws(3, 4, 2, scale=size, seed=seed)},
      "mlp": {"lora": {"up": {"a": _draws(4, 2, scale=size, seed=seed)}}},
    }

  alone, gradients = (
    [layer(seed + n, 10.0**n) for n in range(3)] for seed in (0, 9)
  )
  (apart,) = _steps(optimizer, alone, [gradients])
  stack = functools.partial(jax.tree.map, lambda *leaves: np.stack(leaves))
  (together,) = _steps(optimizer, stack(*alone), [stack(*gradients)])
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8),
    together,
    stack(*apart),
  )


def _newton_schulz(x):
  """Returns five iterations with the coefficients of Keller Jordan."""
  x = x / np.linalg.norm(x)
  for _ in range(5):
    square = x @ x.T
    x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
  return x


def _muon(gradients, momentum):
  """Yields steps with singular values of about 1, downhill."""
  mean = 0.0
  for t, gradient in enumerate(gradients, 1):
    mean = momentum * mean + (1 - momentum) * gradient
    # Nesterov: the mean of the next update, were its gradient the same.
    ahead = momentum * mean / (1 - momentum ** (t + 1))
    ahead = ahead + (1 - momentum) * gradient / (1 - momentum**t)
    yield -_newton_schulz(ahead)


def _layer(**leaves):
  return {"layers": ({"mlp": leaves},), "embed": _draws(5, 4)}


def test_muon_takes_the_steps_of_its_author_and_adam_those_of_the_rest():
  gradients = [_draws(4, 6, seed=n) for n in range(3)]
  others = [_draws(5, 4, seed=n) for n in range(3, 6)]
  optimizer = Muon(
    learning_rate=0.1, momentum=0.9, b1=0.8, b2=0.9, max_grad_norm=1e9
  )
  changes = _steps(
    optimizer,
    _layer(gate=_draws(4, 6)),
    [
      {"layers": ({"mlp": {"gate": gate}},), "embed": embed}
      for gate, embed in zip(gradients, others, strict=True)
    ],
  )
  steps, adam = _muon(gradients, 0.9), _adam(others, 0.8, 0.9)
  for change, step, other in zip(changes, steps, adam, strict=True):
    # Moonlight's scale: 0.2 times the root of the longer side.
    np.testing.assert_allclose(
      change["layers"][0]["mlp"]["gate"], 0.1 * 0.2 * 6**0.5 * step, atol=2e-6
    )
    np.testing.assert_allclose(change["embed"], 0.1 * other, rtol=1e-5)


def test_newton_schulz_makes_singular_values_about_1():
  # Singular vectors are those of the gradient, exactly; values of a random
  # matrix come to lie between 0.65 and 1.25, as its author says of about 1.
  gradient = _draws(16, 24)
  optimizer = Muon(learning_rate=1.0, step_rms=24**-0.5, max_grad_norm=1e9)
  (change,) = _steps(
    optimizer, {"mlp": {"gate": 0 * gradient}}, [{"mlp": {"gate": gradient}}]
  )
  u, _, v = np.linalg.svd(gradient, full_matrices=False)
  inside = -(u.T @ change["mlp"]["gate"] @ v.T)
  values = np.diag(inside)
  assert values.min() > 0.65
  assert values.max() < 1.25
  np.testing.assert_allclose(inside, np.diag(values), atol=2e-5)


def test_the_step_of_a_matrix_has_about_the_stated_mean_square():
  optimizer = Muon(learning_rate=1.0, step_rms=0.2)
  for shape in ((32, 32), (64, 16), (16, 64)):
    gradient = {"mlp": {"up": _draws(*shape)}}
    (change,) = _steps(optimizer, gradient, [gradient])
    rms = np.sqrt((change["mlp"]["up"] ** 2).mean())
    assert 0.15 < rms < 0.25


@pytest.mark.parametrize("kind", ALL)
def test_a_gradient_beyond_the_norm_is_scaled_to_it(kind):
  # Norm 5 over both parameters: with a bound of 1 all are a fifth. The next,
  # of norm 0.5, stays; so the moments tell a clip from none.
  long, short = ({"a": x * np.ones(1), "b": y * np.ones(1)} for x, y in
                 ((3.0, -4.0), (0.3, 0.4)))  # fmt: skip
  fifth = {"a": 0.6 * np.ones(1), "b": -0.8 * np.ones(1)}
  params = {"a": np.ones(1), "b": np.ones(1)}
  clipped = _steps(kind(max_grad_norm=1.0), params, [long, short])
  scaled = _steps(kind(max_grad_norm=1e9), params, [fifth, short])
  whole = _steps(kind(max_grad_norm=1e9), params, [long, short])
  np.testing.assert_allclose(clipped[1]["a"], scaled[1]["a"], rtol=1e-5)
  assert abs(clipped[1]["a"] - whole[1]["a"]) > 1e-5


@pytest.mark.parametrize("max_norm", [0.1, 7.0])
def test_a_clip_that_is_told_the_norm_does_what_that_of_optax_does(max_norm):
  grads = jax.tree.map(jnp.float32, {"a": _draws(5), "b": _draws(3, seed=1)})
  wanted, _ = optax.clip_by_global_norm(max_norm).update(
    grads, optax.EmptyState()
  )
  clip = optimizers.clip_by_norm(max_norm)
  for told in ({}, {"grad_norm": optax.tree.norm(grads)}):
    found, _ = clip.update(grads, clip.init(grads), **told)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("kind", ALL)
def test_a_schedule_scales_the_steps_of_every_optimizer(kind):
  params = [_draws(3, seed=1)]
  halved = kind(
    schedule=LinearRate(decay_updates=2, end=0.0), max_grad_norm=1e9
  )
  ends = _steps(halved, params, [params] * 3)
  plain = _steps(kind(max_grad_norm=1e9), params, [params] * 2)
  np.testing.assert_allclose(ends[0], plain[0], rtol=1e-6)
  np.testing.assert_allclose(ends[1][0], 0.5 * plain[1][0], rtol=1e-5)
  assert not np.any(ends[2][0])


@pytest.mark.parametrize("kind", ALL)
def test_defaults_can_work(kind):
  kind().validate()
  assert isinstance(kind(), optimizers.Optimizer)


@pytest.mark.parametrize(
  ("optimizer", "message"),
  [
    (AdamW(learning_rate=-1.0), r"adamw\.learning_rate=-1\.0 must be a fini"),
    (Muon(max_grad_norm=float("nan")), r"muon\.max_grad_norm=nan must be ab"),
    (
      Adafactor(weight_decay=-0.1),
      r"adafactor\.weight_decay=-0\.1 must be a f",
    ),
    (AdamW(b1=1.0), r"adamw\.b1=1\.0 must be in \[0, 1\)"),
    (AdamW(b2=1.0), r"adamw\.b2=1\.0 must be in \[0, 1\)"),
    (Muon(momentum=-0.1), r"muon\.momentum=-0\.1 must be in"),
    (Muon(iterations=0), r"muon\.iterations=0 must be at least 1; use 5"),
    (Muon(step_rms=0.0), r"muon\.step_rms=0\.0 must be a finite numb"),
    (
      Adafactor(least_factored=0),
      r"adafactor\.least_factored=0 must be at least 1",
    ),
    (Adafactor(decay_exponent=0.0), r"adafactor\.decay_exponent=0\.0 must"),
    (
      Muon(schedule=ConstantRate(warmup_updates=-4)),
      r"schedule\.warmup_updates=-4 must be at least 0",
    ),
  ],
)
def test_a_setting_that_cannot_work_is_refused(optimizer, message):
  with pytest.raises(ValueError, match=message):
    checks.validate(optimizer)
