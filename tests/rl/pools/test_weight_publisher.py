"""Publishing: what moves, from where to where, and what a fault leaves."""

import asyncio
import weakref
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import quantize
from rl.audit import event_log
from rl.engine import contract
from rl.pools import placement, router, weight_publisher, weight_transfer
from rl.runtime import checksum, mesh_thread
from rl.testing import scripted_engine
from tests.helpers import machine_speed

pytestmark = pytest.mark.compiled

VERSION = 7


class Recorded(scripted_engine.ScriptedEngine):
  """Writes down what it is told, in a list that all engines share."""

  def __init__(self, name="a", story=None, fault=None, update_s=0.0):
    super().__init__(lambda request: (), update_s=update_s)
    self.name, self.fault = name, fault
    self.story = [] if story is None else story

  async def update_weights(
    self, version, params, in_flight="recompute", on_step=contract.ignore_step
  ):
    if self.fault is not None:
      raise self.fault
    self.story.append((self.name, version, in_flight))
    await super().update_weights(version, params, in_flight, on_step)


class Damaged(scripted_engine.ScriptedEngine):
  """Flips one bit of what it is given."""

  async def update_weights(
    self, version, params, in_flight="recompute", on_step=contract.ignore_step
  ):
    broken = np.asarray(params["adapter"]).copy()
    broken.view(np.int8).reshape(-1)[0] ^= 1
    params = params | {"adapter": jax.device_put(broken)}
    await super().update_weights(version, params, in_flight, on_step)


@pytest.fixture
def meshes():
  spec = placement.MeshSpec(data=2)
  layouts = placement.Placement(learner=spec, decode=spec).layouts()
  return tuple(layout.mesh for layout in layouts)


@pytest.fixture
def log():
  return event_log.EventLog()


@pytest.fixture
def copier(spans):
  thread = mesh_thread.MeshThread("host", spans)
  yield thread
  thread.close()


@pytest.fixture
def make(thread, copier, spans, log):
  """Returns a publisher to these engines, whose weights lie so."""

  def make(engines, where, **publishing):
    transfer = weight_transfer.MeshTransfer(
      [where] * len(engines),
      thread,
      copier,
      weight_transfer.Publishing(**publishing),
    )
    return weight_publisher.WeightPublisher(
      router.Router(engines), transfer, log, spans
    )

  return make


def staged(log):
  return list(event_log.of_kind(log.events, "staged"))


def replicated(mesh):
  return jax.sharding.NamedSharding(mesh, jax.P())


@pytest.fixture
def params(meshes):
  leaves = {"base": jnp.full(100, 1.0), "adapter": jnp.full(3, 2.0)}
  return jax.device_put(leaves, replicated(meshes[0]))


@pytest.fixture
def where(meshes):
  """Of the engines' weights, unless a test says otherwise."""
  return replicated(meshes[1])


class Staging(Recorded):
  """Has a way to its devices, as an engine in another process."""

  async def stage(self, params):
    if self.fault is not None:
      raise self.fault
    self.story.append((self.name, "staged", sorted(params)))


@pytest.fixture
def make_apart(thread, copier, spans, log, where):
  """Returns a publisher to engines of which the first has a store to read."""

  def make(engines):
    transfer = weight_transfer.MeshTransfer(
      [where] * len(engines), thread, copier, write=jax.device_get, remote=[0]
    )
    return weight_publisher.WeightPublisher(
      router.Router(engines, log=log), transfer, log, spans
    )

  return make


def test_an_engine_elsewhere_has_its_weights_before_any_engine_switches(
  make_apart, params, log
):
  story = []
  engines = Staging("far", story), Recorded("near", story)
  asyncio.run(make_apart(engines).publish(VERSION, params, "recompute"))
  assert story[0] == ("far", "staged", ["adapter", "base"])
  switched = [(name, VERSION, "recompute") for name in ("far", "near")]
  assert sorted(story[1:]) == switched
  # What it was given is what was written, and not an array of a mesh.
  assert type(engines[0].params["base"]) is np.ndarray
  assert isinstance(engines[1].params["base"], jax.Array)
  assert [event["engine"] for event in staged(log)] == [0, 1]


def test_an_engine_that_is_lost_while_it_stages_takes_no_part(
  make_apart, params, log
):
  story, fault = [], contract.EngineClosed("gone")
  engines = Staging("far", story, fault), Recorded("near", story)
  asyncio.run(make_apart(engines).publish(VERSION, params, "recompute"))
  assert story == [("near", VERSION, "recompute")]
  (lost,) = event_log.of_kind(log.events, "engine_lost")
  assert lost["engine"] == 0
  assert [event["engine"] for event in staged(log)] == [1]


async def test_every_copy_is_made_before_the_engines_take_theirs(
  make, log, spans, meshes
):
  params = {"w": jax.device_put(jnp.arange(4.0), replicated(meshes[0]))}
  where = {"w": jax.sharding.NamedSharding(meshes[1], jax.P("data"))}
  story = []

  engines = [Recorded(name, story) for name in "ab"]
  await make(engines, where).publish(VERSION, params, "keep_kv")
  assert story == [("a", 7, "keep_kv"), ("b", 7, "keep_kv")]
  # They switch side by side, when both copies are there.
  told = [(e["kind"], e.get("engine"), e["version"]) for e in log.events]
  begun = [("publish_start", None, 7), ("staged", 0, 7), ("staged", 1, 7)]
  assert (told[:3], told[9:]) == (begun, [("published", None, 7)])
  for engine in (0, 1):
    assert [kind for kind, at, _ in told[3:9] if at == engine] == [
      "decode_suspended",
      "switched",
      "decode_resumed",
    ]
  # Four numbers of four bytes each.
  assert [e["moved_bytes"] for e in staged(log)] == [4 * 4] * 2
  assert [span.name for span in spans.spans] == ["reshard"] * 2 + ["publish"]
  for engine in engines:
    assert engine.params["w"].sharding == where["w"]
    np.testing.assert_array_equal(engine.params["w"], [0, 1, 2, 3])


async def test_the_stall_is_that_of_the_engine_that_stood_longest(
  make, params, where
):

  engines = [Recorded(update_s=s) for s in (0.0, 0.06, 0.03)]
  publisher = make(engines, where)
  stalls = [await publisher.publish(n, params, "recompute") for n in (1, 2)]
  stood = [engine.stats().paused_s for engine in engines]
  # Each is of its own publish; side by side they are no longer than the one.
  assert sum(stalls) == pytest.approx(stood[1])
  assert all(stall_s > 0.05 for stall_s in stalls)


async def test_decoding_goes_on_while_the_copy_is_made(
  make, copier, log, params, where
):
  story = []

  publisher = make([Recorded("a", story)], where)
  go = asyncio.Event()
  loop = asyncio.get_running_loop()
  wait = asyncio.run_coroutine_threadsafe
  busy = asyncio.create_task(
    copier.run(
      "copy", lambda: wait(go.wait(), loop).result(machine_speed.scaled(10))
    )
  )
  publish = asyncio.create_task(publisher.publish(VERSION, params, "drain"))
  await asyncio.sleep(0.02)
  assert story == []
  assert [e["kind"] for e in log.events] == ["publish_start"]
  go.set()
  await asyncio.gather(busy, publish)
  assert len(story) == 1


async def test_an_engine_that_fails_propagates_and_says_who_serves_what(
  make, log, params, where
):

  faults = [None, ValueError("another model's"), None]
  engines = [Recorded(fault=fault) for fault in faults]
  engines[2]._update_s = 30.0
  publisher = make(engines, where)
  with pytest.raises(ValueError, match="another model's") as caught:
    await publisher.publish(VERSION, params, "recompute")
  # The last one was still at it, and was cancelled.
  assert [engine.version for engine in engines] == [7, 0, 0]
  engines[1].fault, engines[2]._update_s = None, 0.0
  await publisher.publish(8, params, "recompute")
  assert [engine.version for engine in engines] == [8, 8, 8]
  assert caught.value.__notes__ == [
    "publishing version 7: engines [0] serve it, [1, 2] do not"
  ]
  switched = event_log.of_kind(log.events, "switched")
  assert [(e["version"], e["engine"]) for e in switched] == [
    *[(7, 0)],
    *[(8, 0), (8, 1), (8, 2)],
  ]
  # The one that was cancelled decodes on, with what it had.
  assert [
    (e["kind"], e["version"]) for e in log.events if e.get("engine") == 2
  ][:3] == [("staged", 7), ("decode_suspended", 7), ("decode_resumed", 7)]
  served = event_log.of_kind(log.events, "published")
  assert [event["version"] for event in served] == [8]


@pytest.mark.parametrize(
  ("dtype", "leaf"), [("same", "adapter"), ("bfloat16", "base")]
)
def test_a_copy_that_fails_leaves_every_engine_and_one_may_publish_again(
  make, log, params, where, dtype, leaf
):
  second = params | {"adapter": params["adapter"] + 1}
  gone = second | {leaf: params[leaf] + 2}
  gone[leaf].delete()

  async def scenario():
    engines = [Recorded(), Recorded()]
    publisher = make(engines, where, dtype=dtype)
    await publisher.publish(VERSION, params, "drain")
    served = [engine.params for engine in engines]
    with pytest.raises(RuntimeError, match="deleted"):
      await publisher.publish(8, gone, "drain")
    for engine, copy in zip(engines, served, strict=True):
      assert (engine.version, engine.params) == (7, copy)
    await publisher.publish(8, second, "drain")
    return engines, served

  engines, served = asyncio.run(scenario())
  for engine, before in zip(engines, served, strict=True):
    np.testing.assert_array_equal(engine.params["adapter"], [3, 3, 3])
    assert engine.params["base"] is before["base"]
  # Of the copy that failed nothing was staged.
  assert [e["version"] for e in staged(log)] == [7, 7, 8, 8]
  size = 4 if dtype == "same" else 2
  assert [e["moved_bytes"] for e in staged(log)[2:]] == [3 * size] * 2


@pytest.mark.parametrize("axis", [None, "data"], ids=["same", "sharded"])
def test_a_copy_survives_the_donation_of_the_original(thread, meshes, axis):
  mesh, _ = meshes
  params = jax.device_put(np.arange(4.0), replicated(mesh))
  where = jax.sharding.NamedSharding(mesh, jax.P(axis))
  copy = asyncio.run(thread.run("copy", weight_transfer.copy_to, params, where))
  jax.jit(lambda x: x + 1, donate_argnums=0)(params)
  np.testing.assert_array_equal(copy, [0, 1, 2, 3])
  assert copy.sharding == where


async def test_only_what_is_another_array_moves_again(
  make, log, spans, params, where
):
  second = params | {"adapter": params["adapter"] + 1}
  engine = Recorded()
  publisher = make([engine], where)
  copy, moved = await publisher.place(params)
  await publisher.publish(VERSION, second, "drain")
  # 103 numbers of 4 bytes, and then 3 of them.
  assert moved == 412
  assert [e["moved_bytes"] for e in staged(log)] == [12]
  assert spans.spans[-1].args["moved_bytes"] == 12
  # The engine gets its own copy again, not one more.
  assert engine.params["base"] is copy["base"]
  assert engine.params["base"].sharding == where
  np.testing.assert_array_equal(engine.params["adapter"], [3, 3, 3])


def test_neither_old_parameters_nor_old_copies_are_kept(
  make, thread, copier, params, where
):
  publisher = make([Recorded()], where, verify=True)
  copy, _ = asyncio.run(publisher.place(params))
  leaf = weakref.ref(params["base"])
  gone = weakref.ref(copy["base"])
  for one in (thread, copier):
    one.close()  # It has left its last job behind.
  del params["base"], copy
  assert leaf() is None
  assert gone() is None


@pytest.mark.parametrize("dtype", ["same", "int8"])
async def test_a_copy_that_the_engine_dropped_is_made_again(
  make, thread, copier, meshes, where, dtype
):
  params = {"embed": jax.device_put(jnp.eye(4), replicated(meshes[0]))}

  publisher = make([Recorded()], where, dtype=dtype)
  await publisher.place(params)
  for one in (thread, copier):
    await one.run("another job", int)
  copy, moved = await publisher.place(params)
  # Of int8 16 values and 4 scales.
  assert moved == (64 if dtype == "same" else 16 + 4 * 4)
  back = quantize.dequantize(copy, jnp.float32)
  np.testing.assert_allclose(back["embed"], np.eye(4), rtol=1e-6)


@pytest.mark.parametrize("dtype", get_args(weight_transfer.Dtype))
async def test_engines_tell_the_checksum_of_what_the_learner_sent(
  make, params, where, spans, dtype
):
  params["embed"] = jax.device_put(jnp.eye(4), params["base"].sharding)

  engines = [Recorded(), Recorded()]
  publisher = make(engines, where, dtype=dtype, verify=True)
  await publisher.publish(VERSION, params, "drain")
  after = params | {"adapter": params["adapter"] + 1}
  first = len(spans.spans)
  await publisher.publish(8, after, "drain")
  assert [span.name for span in spans.spans[first:]].count("checksum") == 1
  told = [await engine.checksum() for engine in engines]
  assert told == [(8, checksum.of(weight_transfer.cast(after, dtype)))] * 2


async def test_an_engine_that_serves_other_weights_is_named(
  make, params, where, log
):

  engines = [Recorded(), Damaged(lambda request: ())]
  publisher = make(engines, where, verify=True)
  with pytest.raises(RuntimeError) as caught:
    await publisher.publish(VERSION, params, "drain")
  message = str(caught.value)
  ((_, sent), (_, broken)) = [await engine.checksum() for engine in engines]
  assert "engine 1 serves version 7 with" in message
  assert f"{broken:016x}" in message
  assert f"version 7 was sent with {sent:016x}" in message
  assert not list(event_log.of_kind(log.events, "published"))
