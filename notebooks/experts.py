# %% [markdown]
# # What a mixture of experts does
#
# **Question.** A layer with experts sends each token to a few of many small
# networks. What do they divide the work by, and does the load balance itself?

# %% tags=["colab"]
# In Colab: asks for the wheel that "Getting started" makes, as
# dist/twinmesh-*.whl, and installs it. Does nothing elsewhere.
import importlib
import subprocess
import sys

if "google.colab" in sys.modules:
  (wheel,) = importlib.import_module("google.colab.files").upload()
  command = [sys.executable, "-m", "pip", "install", f"./{wheel}[envs]"]
  subprocess.run(command, check=True)

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

from launch.cli import jax_setup
from launch.report import notebook
from models import config as model_config
from models import logprobs, policy

jax_setup.keep_compiled()
notebook.use_style()

# %% [markdown]
# ## Data of three kinds
#
# Each row counts on through one of three alphabets of eight symbols: letters
# step by 1, digits by 3, and the rest, written as dots, by 5. So there are
# three rules, and one would guess that experts divide the work by rule, or by
# alphabet.

# %%
SYMBOLS = "abcdefgh" + "01234567" + "⠁⠂⠃⠄⠅⠆⠇⠈"
STEPS = (1, 3, 5)
LENGTH = 16


def rows(random, count):
  """Returns rows of ids, one alphabet in turn for each."""
  kind = np.arange(count) % 3
  start = random.integers(8, size=count)
  places = np.arange(LENGTH + 1)
  symbol = (start[:, None] + np.take(STEPS, kind)[:, None] * places) % 8
  return (8 * kind[:, None] + symbol).astype(np.int32)


for row in rows(np.random.default_rng(0), 3):
  print(" ".join(SYMBOLS[i] for i in row))

# %% [markdown]
# ## A small model
#
# Two layers with six experts each; every token takes two of them. The model is
# the one that runs train, only smaller.

# %%
config = model_config.tiny_moe(
  vocab_size=len(SYMBOLS),
  num_layers=2,
  d_model=32,
  d_expert=16,
  num_heads=2,
  num_kv_heads=2,
  head_dim=16,
  num_experts=6,
  experts_per_token=2,
  max_length=LENGTH,
)
definition = policy.of(config)


def loss(params, ids, balance, experts=None):
  """Returns the loss of the next symbol with a balance loss, and statistics.

  With `experts` the routers have no choice.
  """
  module = definition.bind(params)
  inputs, targets = ids[:, :-1], ids[:, 1:]
  places = jnp.broadcast_to(jnp.arange(LENGTH), inputs.shape)
  hidden, aux = module.hidden(
    inputs, places, jnp.ones_like(inputs), experts=experts
  )
  scores, _ = logprobs.score(
    module.terms(hidden), targets, temperature=1.0, chunk=inputs.size
  )
  # The first symbols do not tell much; all others follow from them.
  nats = -jnp.mean(scores[:, 2:])
  return nats + balance * aux.load_balance, (nats, aux)


optimizer = optax.adam(3e-3)


@jax.jit
def step(params, moments, ids, balance):
  """Returns parameters and optimizer after a step, the loss and statistics."""
  gradients, told = jax.grad(loss, has_aux=True)(params, ids, balance)
  updates, moments = optimizer.update(gradients, moments)
  return optax.apply_updates(params, updates), moments, told


# %% [markdown]
# ## Train it twice
#
# Once with no more than the loss of the next symbol, once with a small loss on
# top that is least when all experts get the same share of the tokens (Switch,
# arXiv 2101.03961).


# %% tags=["varies"]
def train(balance, num_steps=200):
  """Returns the parameters before and after, and curves by name."""
  first = params = definition.init(jax.random.key(0))
  moments = optimizer.init(params)
  random = np.random.default_rng(0)
  curves = {"nats": [], "busiest": [], "unused": []}
  for _ in range(num_steps):
    params, moments, (nats, aux) = step(
      params, moments, rows(random, 24), balance
    )
    curves["nats"].append(float(nats))
    curves["busiest"].append(float(aux.max_load))
    curves["unused"].append(float(aux.unused_experts))
  return first, params, curves


trained = {
  "without balance": train(0.0),
  "with balance": train(0.02),
}
for name, (_, _, curves) in trained.items():
  nats, busiest = curves["nats"], np.mean(curves["busiest"][-20:])
  print(
    f"{name:>16}: loss {nats[0]:.2f} -> {nats[-1]:.3f} nats, "
    f"busiest expert {busiest:.2f} times its share"
  )

# %% [markdown]
# Both learn the task: the loss of a uniform guess would be ln 24 = 3.18 nats.
# They differ in who does the work.

# %% tags=["varies"]
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4))
for name, (_, _, curves) in trained.items():
  left.plot(curves["nats"], label=name)
  right.plot(curves["busiest"], label=name)
left.set(title="loss of the next symbol", xlabel="step", ylabel="nats")
right.set(
  title="busiest expert of both layers",
  xlabel="step",
  ylabel="load / even share",
  ylim=(0.9, None),
)
right.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
plt.show()

# %% [markdown]
# **What to see.** At 1 all experts have the same load; at 3 (six experts, two
# for each token) two of them get everything. On devices, the busiest one is the
# one that all others wait for. The balance loss costs no accuracy here and
# brings the load close to even.

# %% [markdown]
# ## Who takes what
#
# Now the routing itself: the share of each symbol's tokens that an expert of
# the second layer takes. A row is an expert, a column a symbol; the three
# alphabets lie side by side.


# %%
@jax.jit
def routed(params, ids):
  """Returns the experts of every id by layer, as decoding records them."""
  module = definition.bind(params)
  cache = module.init_cache(pages=1, page_size=LENGTH)
  tables = jnp.zeros((1, 1), jnp.int32)
  _, _, experts = module.feed(
    cache, tables, ids, jnp.arange(LENGTH, dtype=jnp.int32), (1, LENGTH)
  )
  assert experts is not None  # As it is without any.
  return experts[:, 0]


def shares(params, layer):
  """Returns the share of each symbol's tokens that each expert takes."""
  counts = np.zeros((config.num_experts, len(SYMBOLS)))
  for row in rows(np.random.default_rng(1), 48)[:, :LENGTH]:
    chosen = np.asarray(routed(params, row))[:, layer]
    np.add.at(counts, (chosen, row[:, None]), 1)
  return counts / counts.sum(0) * config.experts_per_token


# %% tags=["varies"]
first = trained["with balance"][0]
pictures = {
  "before training": shares(first, 1),
  **{name: shares(params, 1) for name, (_, params, _) in trained.items()},
}
figure, every_axes = plt.subplots(3, 1, figsize=(9, 6.4), sharex=True)
for axes, (name, picture) in zip(every_axes, pictures.items(), strict=True):
  axes.imshow(picture, cmap="viridis", vmin=0, vmax=1, aspect="auto")
  axes.set(title=name, ylabel="expert", yticks=range(config.num_experts))
  for edge in (7.5, 15.5):
    axes.axvline(edge, color="white", lw=2)
every_axes[-1].set_xticks([3.5, 11.5, 19.5], ["letters", "digits", "dots"])
figure.colorbar(
  every_axes[0].images[0], ax=every_axes, label="share of the symbol's tokens"
)
plt.show()


# %% tags=["varies"]
def by_alphabet(picture):
  """Returns the share of an expert's tokens that is of its main alphabet."""
  kinds = picture.reshape(config.num_experts, 3, 8).sum(2)
  return kinds.max(1).sum() / kinds.sum()


def by_symbol(picture):
  """Returns the share of choices that a symbol's two main experts get."""
  return np.sort(picture, 0)[-config.experts_per_token :].sum() / picture.sum()


for name, picture in pictures.items():
  print(
    f"{name:>16}: main alphabet of an expert {by_alphabet(picture):.0%}, "
    f"two main experts of a symbol {by_symbol(picture):.0%}"
  )

# %% [markdown]
# **What to see.** Most cells are yellow or dark: a symbol nearly always goes to
# the same two experts, whatever comes before it. But no expert has an alphabet
# of its own; its share of its main one is no higher than before training.
# Experts divide the work by *token*, along lines that the random start has
# drawn, and not by topic. Routers of large models do much of the same: Mixtral,
# arXiv 2401.04088, section 5; OpenMoE, 2402.01739.

# %% [markdown]
# ## Does it matter who?
#
# If all experts had learned the same, any two would do. So take the choice away
# from the routers: each token goes to two experts at random.


# %% tags=["varies"]
random = np.random.default_rng(2)
ids = rows(random, 48)
shape = (48, LENGTH, config.num_layers, 1)
order = np.tile(np.arange(config.num_experts), shape)
anyone = random.permuted(order, axis=-1)[..., : config.experts_per_token]
measure = jax.jit(lambda *given: loss(*given)[1][0])
params = trained["with balance"][1]
chosen_nats = float(measure(params, ids, 0.0))
random_nats = float(measure(params, ids, 0.0, anyone))
print(f"experts that the router chooses: {chosen_nats:.3f} nats")
print(f"two experts at random:           {random_nats:.3f} nats")

# %% [markdown]
# The same weights lose most of what they know: each expert knows its own
# symbols only. That is why a run trains with the experts that each token took
# when it was sampled, if those are recorded, and why an engine that routes
# otherwise than the learner is a different policy.
#
# **What to take along.** Experts do not specialise by topic; a balance loss
# evens out their load at no cost; and the routing is a part of the policy. In a
# run the metrics `max_load` and `unused_experts` tell of the load, and the
# setting `algorithm.balance_weight` is the weight of that loss.
#
# *Exercise.* Set `num_layers=1` and look at layer 0. Is the picture sharper?
