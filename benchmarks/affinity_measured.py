"""Affinity over two engine processes of different speed: measured, simulated.

  python -m benchmarks.affinity_measured [--repeats=5] [--sessions=48]

  sessions --> Router --+--> a process for context
                        +--> a process for answers

Two kinds of environments, half of the sessions each: short turns, which encode
much and sample little, and long answers. In a round of any routing the same
sessions come in the same order, `_AT_ONCE` of them at a time, the next when one
has ended. Caches are empty at the beginning and routers have learned nothing,
so that what is lost to exploration counts.

  none            sessions go to the engine with the fewest
  declared        turns prefer the first pool, answers the second; a session
                  goes elsewhere, and is a fallback, when the other pool has
                  fewer sessions (overload=1)
  declared twice  the same, when it has less than half as many (overload=2)
  strict          no session leaves the pool declared for it
  learned         by the seconds of a session on each pool, as measured

Each process has a share of a processor (paced_engine.py), by kind of program:

  two kinds    the ratios of an H800 and an H20: RollArt (arXiv 2512.22560),
               table 2, 989.5 by 148 TFLOPS to encode, 3.35 by 4 TB/s to sample
  two speeds   the second is three times as fast, at everything
  alike        there is no difference

The prediction plays the same sessions through the same router on the built-in
engine in virtual time, dispatch by dispatch. It has two constants of each
process, from rounds of one kind of session alone: the seconds of a dispatch
that encodes, and of one that only samples. Sides take turns, every other time
backwards. Writes medians over repeats, and of the ratios to `none` in the same
repeat, to benchmarks/results/affinity_measured.json.
"""

import asyncio
import dataclasses
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import app, flags
from jaxtyping import Int32

from benchmarks import machine, paced_engine
from launch.cli import jax_setup
from models import config as model_config
from rl.engine import contract
from rl.pools import affinity, placement, router
from rl.runtime import trace, virtual_clock
from rl.simulation import dispatched_engine, host_thread

_REPEATS = flags.DEFINE_integer("repeats", 5, "Of each routing.", 1)
_SESSIONS = flags.DEFINE_integer("sessions", 48, "Of a round, half a kind.", 2)
_AT_ONCE = 16
_MODEL = model_config.tiny_moe(
  num_layers=1, d_model=64, d_ff=128, num_experts=0, max_length=512
)
_ENGINE = paced_engine.PacedEngine(
  slots=_AT_ONCE,
  row_buckets=(_AT_ONCE,),
  chunk_buckets=(64,),
  compile_ahead=True,
)
_PLACE = placement.Placement()
_INFOS = (
  placement.EngineInfo("context", "compute"),
  placement.EngineInfo("answers", "bandwidth"),
)
_MOST = paced_engine.MOST
POOLS = {
  "two kinds": paced_engine.TWO_KINDS,
  "two speeds": (
    paced_engine.Shares(_MOST / 3, _MOST / 3),
    paced_engine.Shares(_MOST, _MOST),
  ),
  "alike": paced_engine.ALIKE,
}


class Needs(NamedTuple):
  """The turns of a session, and the ids of each: of context and answer."""

  turns: int
  prompt: int
  answer: int


NEEDS = {"turns": Needs(6, 64, 4), "answers": Needs(1, 16, 160)}
_DECLARED = affinity.Routing(
  prefer={"turns": "context", "answers": "answers"}, overload=1.0
)
ROUTINGS = {
  "none": affinity.Routing(),
  "declared": _DECLARED,
  "declared twice": dataclasses.replace(_DECLARED, overload=2.0),
  "strict": dataclasses.replace(_DECLARED, overload=None),
  "learned": affinity.Routing(learn=True),
}


# Sessions.


class Round(NamedTuple):
  """The duration of a round, and the counts of its router."""

  wall_s: float
  routes: Mapping[str, float]


def order(count: int, seed: int) -> list[str]:
  """Returns the kinds of so many sessions, half of each, as they come."""
  kinds = [name for name in NEEDS for _ in range(count // 2)]
  random.Random(seed).shuffle(kinds)
  return kinds


async def play(
  serving: router.Router, kinds: Sequence[str], seed: int
) -> Round:
  """Plays sessions of these kinds; `seed` decides their ids."""
  await serving.flush_cache()
  places, loop = asyncio.Semaphore(_AT_ONCE), asyncio.get_running_loop()
  start_s = loop.time()
  async with asyncio.TaskGroup() as tasks:
    for number, kind in enumerate(kinds):
      await places.acquire()
      one = tasks.create_task(_session(serving, kind, seed, number))
      one.add_done_callback(lambda done: places.release())
  return Round(loop.time() - start_s, serving.describe())


async def _session(
  serving: router.Router, kind: str, seed: int, number: int
) -> None:
  """Plays one session: context, answer, more context, and so on."""
  needs, name = NEEDS[kind], f"{seed} {number}"
  rng = np.random.default_rng((seed, number))
  ids = np.zeros(0, np.int32)
  await serving.begin(name, kind)
  try:
    for turn in range(needs.turns):
      more = rng.integers(_MODEL.vocab_size, size=needs.prompt, dtype=np.int32)
      ids = np.concatenate([ids, more])
      answer = await serving.generate(
        contract.DecodeRequest(
          request_id=f"{name} {turn}",
          session=name,
          tokens=ids,
          max_tokens=needs.answer,
          seed=number,
        )
      )
      ids = np.concatenate([ids, answer.tokens])
  finally:
    serving.end(name)


# The prediction.


class Seconds(NamedTuple):
  """Seconds of a dispatch that encodes, and of one that only samples."""

  encode: float
  sample: float


async def seconds(
  engine: contract.DecodeEngine, spans: trace.Trace, seed: int
) -> Seconds:
  """Returns means over rounds of one kind of session, on one engine alone."""
  found = {}
  for kind, name in (("turns", "encode"), ("answers", "decode")):
    first = len(spans.spans)
    await play(router.Router([engine]), [kind] * _AT_ONCE, seed)
    found[name] = statistics.fmean(
      span.end - span.start for span in spans.spans[first:] if span.name == name
    )
  return Seconds(found["encode"], found["decode"])


def predicted(
  engines: Sequence[Seconds],
  routing: affinity.Routing,
  kinds: Sequence[str],
  seed: int,
) -> Round:
  """Plays the same round on simulated engines."""

  def conversation(
    request: contract.DecodeRequest,
  ) -> tuple[Int32[np.ndarray, " P"], Int32[np.ndarray, " T"]]:
    return request.tokens, np.zeros(request.max_tokens, np.int32)

  async def simulate() -> Round:
    thread = host_thread.HostThread(host_thread.HostWork())
    played = [
      dispatched_engine.DispatchedEngine(
        dispatched_engine.Dispatches(
          settings=_ENGINE,
          model=_MODEL,
          layout=_PLACE.layouts()[1],
          dispatch_s=each.sample,
          encode_s=each.encode,
        ),
        conversation,
        thread,
      )
      for each in engines
    ]
    weights: Any = 0  # Only a version.
    for engine in played:
      await engine.start(weights, 0)
    serving = router.Router(played, infos=_INFOS, routing=routing)
    done = await play(serving, kinds, seed)
    await serving.close()
    return done

  return virtual_clock.run(simulate())


# Processes.


async def measured(
  pools: Sequence[paced_engine.Shares],
) -> list[list[dict[str, Any]]]:
  """Returns the rows of each repeat, measured and predicted."""
  repeats, spans = [], trace.Trace(None)
  shares = dict(zip(_INFOS, pools, strict=True))
  async with paced_engine.processes(shares, spans, _MODEL, _ENGINE) as engines:
    for repeat in range(_REPEATS.value + 1):
      alone = [await seconds(engine, spans, repeat) for engine in engines]
      kinds, rounds = order(_SESSIONS.value, repeat), {}
      for name in list(ROUTINGS)[:: -1 if repeat % 2 else 1]:
        serving = router.Router(engines, infos=_INFOS, routing=ROUTINGS[name])
        rounds[name] = await play(serving, kinds, repeat)
      if repeat:  # The first is for whatever happens late.
        said = {
          name: predicted(alone, routing, kinds, repeat)
          for name, routing in ROUTINGS.items()
        }
        repeats.append(_rows(rounds, said))
        machine.show(str(alone), repeats[-1])
  return repeats


def _rows(
  rounds: Mapping[str, Round], said: Mapping[str, Round]
) -> list[dict[str, Any]]:
  """Returns a row for each routing of one repeat, measured and predicted."""
  return [
    {
      "routing": name,
      "wall_s": rounds[name].wall_s,
      "gain": rounds["none"].wall_s / rounds[name].wall_s,
      **_counts(rounds[name]),
      "predicted_s": said[name].wall_s,
      "predicted gain": said["none"].wall_s / said[name].wall_s,
      "predicted fallbacks": _counts(said[name])["fallbacks"],
    }
    for name in ROUTINGS
  ]


def _counts(played: Round) -> dict[str, float]:
  """Returns fallbacks, and the sessions on the pool declared for them."""
  inside = {
    kind: played.routes.get(f"sessions/{pool}/{kind}", 0.0)
    for kind, pool in _DECLARED.prefer.items()
  }
  return {"fallbacks": played.routes["route_fallbacks"], **inside}


def _medians(repeats: Sequence[Sequence[Mapping[str, Any]]]) -> list[Any]:
  """Returns a row for each routing: medians, and the range of its gain."""
  found = []
  for rows in zip(*repeats, strict=True):
    numbers = [name for name in rows[0] if name != "routing"]
    found.append(
      {"routing": rows[0]["routing"]}
      | {name: statistics.median(x[name] for x in rows) for name in numbers}
      | machine.spread("gain", [row["gain"] for row in rows])
    )
  return found


def main(_: list[str]) -> None:
  """Measures, prints and keeps the rows of all pools."""
  jax_setup.prepare(_PLACE)
  kept = {}
  for name, pools in POOLS.items():
    kept[name] = _medians(asyncio.run(measured(pools)))
    machine.show(name, kept[name])
  machine.keep(
    "affinity_measured",
    repeats=_REPEATS.value,
    sessions=_SESSIONS.value,
    shares=POOLS,
    pools=kept,
  )


if __name__ == "__main__":
  app.run(main)
