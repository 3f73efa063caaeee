"""The parts of the measured affinity that need no processes."""

import time
import types

import pytest

from benchmarks import affinity_measured, paced_engine

SECONDS = (
  affinity_measured.Seconds(encode=0.05, sample=0.03),
  affinity_measured.Seconds(encode=0.35, sample=0.025),
)


def predicted(routing, seconds=SECONDS):
  return affinity_measured.predicted(
    seconds,
    affinity_measured.ROUTINGS[routing],
    affinity_measured.order(24, seed=0),
    seed=0,
  )


def test_a_strict_declaration_is_kept_and_pays_where_pools_differ():
  blind, strict = predicted("none"), predicted("strict")
  assert strict.routes["sessions/context/turns"] == 12
  assert strict.routes["sessions/answers/answers"] == 12
  assert strict.routes["route_fallbacks"] == 0
  assert strict.wall_s < blind.wall_s


def test_a_declaration_with_an_overload_counts_its_fallbacks():
  routes = predicted("declared").routes
  inside = [routes[f"sessions/{pool}/{kind}"] for kind, pool in
            (("turns", "context"), ("answers", "answers"))]  # fmt: skip
  assert routes["route_fallbacks"] == 24 - sum(inside) > 0


class _Thread:
  """Runs what is submitted at once, and keeps its names."""

  def __init__(self):
    self.names = []

  def submit(self, name, function, *args):
    self.names.append(name)
    return function(*args)


@pytest.mark.parametrize(("chunks", "share"), [((4, 64), 0.05), ((0, 1), 0.1)])
def test_a_program_takes_its_processor_time_over_its_share(chunks, share):
  def program(params, dispatch, uploads):
    until_s = time.process_time() + 0.005
    while time.process_time() < until_s:
      pass

  thread = _Thread()
  paced = paced_engine._PacedThread(thread, encode=0.05, sample=0.1)  # pyright: ignore[reportArgumentType]
  start_s = time.monotonic()
  dispatch = types.SimpleNamespace(chunks=chunks)
  paced.submit("decode", program, None, dispatch, None)
  assert time.monotonic() - start_s >= 0.005 / share
  assert thread.names == ["encode" if chunks[0] else "decode"]


def test_what_is_no_dispatch_is_not_paced():
  thread = _Thread()
  paced = paced_engine._PacedThread(thread, encode=0.05, sample=0.1)  # pyright: ignore[reportArgumentType]
  assert paced.submit("free", lambda: 3) == 3
  assert thread.names == ["free"]
