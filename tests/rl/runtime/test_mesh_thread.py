"""One thread a mesh: order, cancellation and the ban on implicit transfers."""

import asyncio
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.runtime import mesh_thread, trace
from tests.helpers import machine_speed

pytestmark = pytest.mark.compiled


async def test_work_runs_in_order_on_one_thread_off_the_event_loop(
  thread, spans
):
  order = []

  def work(i):
    order.append(i)
    return threading.get_ident()

  threads = await asyncio.gather(
    *(thread.run(f"work {i}", work, i) for i in range(5))
  )
  assert order == [0, 1, 2, 3, 4]
  assert len(set(threads)) == 1
  assert threading.get_ident() not in threads
  assert [(s.track, s.name) for s in spans.spans] == [
    ("learner", f"work {i}") for i in range(5)
  ]
  # Spans on one thread cannot overlap.
  ends = [x for span in spans.spans for x in (span.start, span.end)]
  assert ends == sorted(ends)


async def test_a_cancelled_caller_leaves_the_program_running(thread):
  begun, go, order = threading.Event(), threading.Event(), []

  def slow():
    begun.set()
    go.wait(machine_speed.scaled(10))
    order.append("slow")

  caller = asyncio.create_task(thread.run("slow", slow))
  await asyncio.to_thread(begun.wait, 10)
  caller.cancel()
  with pytest.raises(asyncio.CancelledError):
    await caller
  following = asyncio.create_task(thread.run("next", order.append, "next"))
  await asyncio.sleep(0.01)
  assert order == []
  go.set()
  await following
  assert order == ["slow", "next"]


async def test_an_exception_reaches_the_caller_and_the_thread_goes_on(thread):
  with pytest.raises(ZeroDivisionError):
    await thread.run("bad", lambda: 1 / 0)
  assert await thread.run("good", lambda: 7) == 7


def test_only_explicit_transfers_are_allowed(thread):
  double = jax.jit(lambda x: 2 * x)

  def explicit():
    return jax.device_get(double(jax.device_put(np.arange(3))))

  async def scenario():
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
      await thread.run("implicit", double, np.arange(3))
    return await thread.run("explicit", explicit)

  np.testing.assert_array_equal(asyncio.run(scenario()), [0, 2, 4])


def test_arrays_are_ready_when_run_returns(thread):
  x = jax.device_put(jnp.ones((400, 400)))
  product = jax.jit(lambda x: x @ x @ x)
  result = asyncio.run(thread.run("product", product, x))
  assert result.is_ready()


async def test_programs_are_queued_at_once_and_answer_in_order(thread):
  go, order = threading.Event(), []

  def work(i):
    go.wait(machine_speed.scaled(10))
    order.append(i)
    return i

  futures = [thread.submit("work", work, i) for i in range(3)]
  await asyncio.sleep(0.01)
  assert not any(future.done() for future in futures)
  # Who no longer waits for a result does not stop its program.
  futures[1].cancel()
  go.set()
  assert [await futures[0], await futures[2]] == [0, 2]
  assert order == [0, 1, 2]


async def test_a_closed_thread_refuses_work_after_what_is_queued(spans):
  thread, order = mesh_thread.MeshThread("decode", spans), []

  queued = thread.submit("work", order.append, 1)
  thread.close()
  await queued
  with pytest.raises(RuntimeError, match="the decode thread was closed"):
    thread.submit("work", order.append, 2)
  with pytest.raises(RuntimeError, match="the decode thread was closed"):
    await thread.run("work", order.append, 3)
  assert order == [1]


async def test_a_program_that_hangs_is_known_until_it_ends(monkeypatch):
  monkeypatch.setattr(mesh_thread, "_CLOSE_S", 0.01)
  thread, go = (
    mesh_thread.MeshThread("decode", trace.Trace(None)),
    threading.Event(),
  )

  hung = thread.submit("decode", lambda: go.wait(machine_speed.scaled(60)))
  hung.add_done_callback(lambda _: None)
  thread.close()
  assert mesh_thread.is_one_left_behind()
  go.set()
  await hung
  thread._thread.join()
  assert not mesh_thread.is_one_left_behind()
