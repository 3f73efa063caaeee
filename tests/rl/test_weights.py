"""Publishing: the order of events, failures, and copies that share nothing."""

import asyncio
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl import (
  events,
  placement,
  testing,
  trajectory,
  weights,
)

VERSION = trajectory.PolicyVersion(7)


class Recorded(testing.FakeEngine):
  """Writes down what it is told, in a list that all engines share."""

  def __init__(self, name, story, log, refuses=False):
    super().__init__(answers=(1,), stop_id=2)
    self.name, self.story, self.log = name, story, log
    self.refuses = refuses

  async def pause(self, in_flight):
    await super().pause(in_flight)
    self.story.append(f"{self.name} pauses to {in_flight}")

  async def update_weights(self, version, params):
    if self.refuses:
      raise ValueError("another model's")
    assert not self._open.is_set()
    kinds = [event["kind"] for event in self.log.events]
    self.story.append(f"{self.name} takes {version} after {kinds}")
    await super().update_weights(version, params)

  def resume(self):
    self.story.append(f"{self.name} resumes")
    super().resume()


@pytest.fixture
def meshes():
  spec = placement.MeshSpec(data=2)
  layouts = placement.Placement(learner=spec, decode=spec).layouts()
  return tuple(layout.mesh for layout in layouts)


def replicated(mesh):
  return jax.sharding.NamedSharding(mesh, jax.P())


def test_every_engine_is_paused_before_the_first_takes_the_weights(
  thread, spans, meshes
):
  learner_mesh, decode_mesh = meshes
  params = {"w": jax.device_put(jnp.arange(4.0), replicated(learner_mesh))}
  where = {"w": jax.sharding.NamedSharding(decode_mesh, jax.P("data"))}
  story, log = [], events.EventLog()

  async def scenario():
    engines = [Recorded(name, story, log) for name in "ab"]
    publisher = weights.WeightPublisher(
      [(engine, where) for engine in engines], thread, log, spans
    )
    return engines, await publisher.publish(VERSION, params, "recompute")

  engines, stall_s = asyncio.run(scenario())
  assert story == [
    "a pauses to recompute",
    "b pauses to recompute",
    "a takes 7 after ['publish_start']",
    "b takes 7 after ['publish_start']",
    "a resumes",
    "b resumes",
  ]
  assert [(e["kind"], e["version"]) for e in log.events] == [
    ("publish_start", 7),
    ("published", 7),
  ]
  # Two engines, four numbers of four bytes each.
  assert log.events[0]["moved_bytes"] == 2 * 4 * 4
  # The copies are made before anyone pauses.
  assert [span.name for span in spans.spans] == ["reshard"] * 2 + ["publish"]
  assert stall_s > 0
  for engine in engines:
    assert engine.params["w"].sharding == where["w"]
    np.testing.assert_array_equal(engine.params["w"], [0, 1, 2, 3])


def test_an_engine_that_refuses_the_weights_keeps_all_paused(
  thread, spans, meshes
):
  where = replicated(meshes[0])
  params = jax.device_put(jnp.arange(4.0), where)
  story, log = [], events.EventLog()

  async def scenario():
    engines = [Recorded("a", story, log), Recorded("b", story, log, True)]
    publisher = weights.WeightPublisher(
      [(engine, where) for engine in engines], thread, log, spans
    )
    with pytest.raises(ValueError, match="another model's"):
      await publisher.publish(VERSION, params, "drain")

  asyncio.run(scenario())
  assert not [step for step in story if "resumes" in step]
  assert [event["kind"] for event in log.events] == ["publish_start"]


def test_decoding_goes_on_while_the_copy_is_made(thread, spans, meshes):
  where = replicated(meshes[0])
  params = jax.device_put(jnp.arange(4.0), where)
  story, log = [], events.EventLog()

  async def scenario():
    publisher = weights.WeightPublisher(
      [(Recorded("a", story, log), where)], thread, log, spans
    )
    go = asyncio.Event()
    loop = asyncio.get_running_loop()
    wait = asyncio.run_coroutine_threadsafe
    busy = asyncio.create_task(
      thread.run("train", lambda: wait(go.wait(), loop).result(10))
    )
    publish = asyncio.create_task(publisher.publish(VERSION, params, "drain"))
    await asyncio.sleep(0.02)
    assert (story, log.events) == ([], [])
    go.set()
    await asyncio.gather(busy, publish)

  asyncio.run(scenario())
  assert story[-1] == "a resumes"


@pytest.mark.parametrize("axis", [None, "data"], ids=["same", "sharded"])
def test_a_copy_survives_the_donation_of_the_original(thread, meshes, axis):
  mesh, _ = meshes
  params = jax.device_put(np.arange(4.0), replicated(mesh))
  where = jax.sharding.NamedSharding(mesh, jax.P(axis))
  copy = asyncio.run(thread.run("copy", weights.copy_to, params, where))
  jax.jit(lambda x: x + 1, donate_argnums=0)(params)
  np.testing.assert_array_equal(copy, [0, 1, 2, 3])
  assert copy.sharding == where


def test_a_copy_of_the_same_sharding_shares_no_buffer(thread, meshes):
  where = replicated(meshes[0])
  params = jax.device_put(np.arange(4.0), where)
  copy = asyncio.run(thread.run("copy", weights.copy_to, params, where))

  def buffers(x):
    return {s.data.unsafe_buffer_pointer() for s in x.addressable_shards}

  assert not buffers(params) & buffers(copy)


@pytest.fixture
def publisher(thread, spans, meshes):
  """Of one engine, which is open."""
  log = events.EventLog()
  engine = Recorded("a", [], log)
  where = replicated(meshes[1])
  return weights.WeightPublisher([(engine, where)], thread, log, spans)


def two_leaves(meshes, base, adapter):
  return jax.device_put(
    {"base": jnp.full(100, base), "adapter": jnp.full(3, adapter)},
    replicated(meshes[0]),
  )


def test_only_what_is_another_array_moves_again(publisher, spans, meshes):
  first = two_leaves(meshes, 1.0, 2.0)
  second = first | {"adapter": first["adapter"] + 1}

  async def scenario():
    start = await publisher.place(first)
    await publisher.publish(VERSION, second, "drain")
    return start

  (copy, moved), engine = asyncio.run(scenario()), publisher._pools[0][0]
  # 103 numbers of 4 bytes, and then 3 of them.
  assert moved == 412
  assert publisher._log.events[0]["moved_bytes"] == 12
  assert spans.spans[-1].args["moved_bytes"] == 12
  # The engine gets its own copy again, not one more.
  assert engine.params["base"] is copy["base"]
  assert engine.params["base"].sharding == replicated(meshes[1])
  np.testing.assert_array_equal(engine.params["adapter"], [3, 3, 3])


def test_equal_numbers_in_another_array_move(publisher, meshes):
  async def scenario():
    _, first = await publisher.place(two_leaves(meshes, 1.0, 2.0))
    _, second = await publisher.place(two_leaves(meshes, 1.0, 2.0))
    return first, second

  assert asyncio.run(scenario()) == (412, 412)


def test_neither_old_parameters_nor_old_copies_are_kept(
  publisher, thread, meshes
):
  params = two_leaves(meshes, 1.0, 2.0)
  copy, _ = asyncio.run(publisher.place(params))
  leaf = weakref.ref(params["base"])
  gone = weakref.ref(copy["base"])
  thread.close()  # It has left its last job behind.
  del params["base"], copy
  assert leaf() is None
  assert gone() is None


def test_a_copy_that_the_engine_dropped_is_made_again(
  publisher, thread, meshes
):
  params = two_leaves(meshes, 1.0, 2.0)

  async def scenario():
    await publisher.place(params)
    await thread.run("another job", int)
    return await publisher.place(params)

  copy, moved = asyncio.run(scenario())
  assert moved == 412
  np.testing.assert_array_equal(copy["adapter"], [2, 2, 2])
