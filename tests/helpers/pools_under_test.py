"""Routers over scripted engines, and who plays on them, for tests."""

import asyncio
from typing import Any

import numpy as np

from models.chat import word_chat
from rl.audit import event_log
from rl.engine import contract
from rl.pools import affinity, router, weight_publisher
from rl.runtime import trace
from rl.simulation import learner as simulated_learner
from rl.testing import fakes, scripted_engine
from tests.helpers import players_under_test as players
from tests.helpers import virtual_run


def engine(
  words=(5, 6), delay_s=0.0, kind=scripted_engine.ScriptedEngine, **settings
):
  """Returns an engine that takes `delay_s` for every answer."""
  say = scripted_engine.one_of(words, word_chat.END)
  return kind(say, lambda request, i: i * delay_s, **settings)


def starting(kind=scripted_engine.ScriptedEngine, start_s=2.0) -> Any:
  """Returns an engine for a run, which takes weights in 0.5 s."""
  words = (players.YES, players.NO)
  return engine(words, 1.0, kind, start_s=start_s, update_s=0.5)


def run(schedule, **fields):
  """Returns a run of engines of `starting`, with weights 1 s on their way."""
  return virtual_run.Run(
    schedule,
    **{
      "rounds": 5,
      "source": fakes.Counting(turns=3),
      "transfer_s": 1.0,
      "update_s": 0.5,
      "build_again": starting,
      **fields,
    },
  )


def request(name="a", session=None, ids=(3, 1), **fields):
  """Returns a request for two ids."""
  return contract.DecodeRequest(
    request_id=name,
    session=session or name,
    tokens=np.array(ids, np.int32),
    max_tokens=2,
    stop_ids=(word_chat.END,),
    **fields,
  )


def pool(count=2, delay_s=0.0, *, log=None, routing=None, infos=None):
  """Returns a router over engines that take `delay_s` for every answer."""
  engines = [engine(delay_s=delay_s) for _ in range(count)]
  settings = affinity.Routing(**(routing or {}))
  pooled = router.Router(engines, infos=infos, routing=settings, log=log)
  return pooled, engines


class Pool:
  """A router and who publishes to it, outside of a run.

  Answers take 1 s, and copies of weights another.
  """

  def __init__(self, count=1, transfer=None, **settings):
    clock = asyncio.get_running_loop().time
    self.log = event_log.EventLog(clock=clock)
    self.router, self.engines = pool(count, 1.0, log=self.log, **settings)
    self.publisher = weight_publisher.WeightPublisher(
      self.router,
      transfer or simulated_learner.SimulatedTransfer(1.0),
      self.log,
      trace.Trace(None, clock=clock),
    )
    self.publisher.begin(0, None)

  async def lose(self, number):
    """Closes an engine, and has the router find out."""
    await self.router.engines[number].close()
    await self.router.flush_cache()


async def begun(pooled, *args, **kwargs):
  """Returns the task of a request that its engine has."""
  answer = asyncio.create_task(pooled.generate(request(*args, **kwargs)))
  await asyncio.sleep(0)
  return answer


def busy(engines):
  """Returns how many requests each engine has."""
  return [one.stats().running + one.stats().waiting for one in engines]


async def episode(pooled, session, domain="", turns=3):
  """Plays a conversation; returns its engine and the versions of its ids."""
  number, versions = await pooled.begin(session, domain), []
  try:
    for turn in range(turns):
      answer = await pooled.generate(request(f"{session}/{turn}", session))
      versions += answer.versions.tolist()
      await asyncio.sleep(0.5)
  finally:
    pooled.end(session)
  return number, versions


def publish(pooled, version, in_flight="drain"):
  """Gives every engine a version, side by side, as the publisher does."""
  updates = [
    pooled.update_weights(i, version, None, in_flight)
    for i in range(len(pooled.engines))
  ]
  return asyncio.gather(*updates)
