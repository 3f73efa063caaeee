"""Players over a scripted engine, and what they leave in the log, for tests."""

import asyncio
import dataclasses

from envs.rewards import rewards
from models.chat import word_chat
from rl.audit import event_log
from rl.pools import router
from rl.rollout import grading, group_rollout
from rl.runtime import virtual_clock
from rl.runtime import watchdog as watchdog_lib
from rl.testing import fakes, scripted_engine

LIMITS = group_rollout.Rollout(
  group_size=4, max_turns=4, turn_tokens=2, max_tokens=32, step_s=0.2
)
ONE = dataclasses.replace(LIMITS, group_size=1)
CHAT = word_chat.WordChat(("go", "on", "yes", "no"))
YES, NO = 5, 6

_ONCE = grading.Retries(attempts=1, deadline_s=0.1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept(fakes.Counting):
  """A source that keeps the environments it built."""

  kept: list = dataclasses.field(default_factory=list)

  def __call__(self, task):
    environment = super().__call__(task)
    self.kept.append(environment)
    return environment


def engine(
  words=(YES,),
  delay_s=lambda priority: 0.0,
  kind=scripted_engine.ScriptedEngine,
  **settings,
):
  """Returns an engine whose stop ids come so late after their word."""

  def later_s(request, i):
    return delay_s(request.priority) if i else 0.0

  return kind(scripted_engine.one_of(words, word_chat.END), later_s, **settings)


def player(
  source, served=None, reward=None, watchdog=watchdog_lib.UNHEARD, **fields
):
  """Returns what plays on the running loop; its log has the loop's time."""
  log = event_log.EventLog(clock=asyncio.get_running_loop().time)
  fields = {"limits": LIMITS, **fields}
  return group_rollout.Player(
    source=source,
    router=router.Router([served or engine()], log=log),
    chat=CHAT,
    graders=grading.Graders(
      reward or rewards.Outcome(), _ONCE, watchdog=watchdog
    ),
    log=log,
    watchdog=watchdog,
    **fields,
  )


def begin(playing, group_id=3):
  """Returns a play of the first task that is still to be run."""
  task = playing.source.task(0, "train")
  return group_rollout.GroupRollout(
    playing,
    task,
    group_id=group_id,
    seed=0,
    admitted=0,
  )


def play_group(source, *args, **fields):
  """Plays a group to its end, in virtual time."""

  async def run():
    playing = player(source, *args, **fields)
    group = await begin(playing).run()
    await closed(playing)
    return group

  return virtual_clock.run(run())


async def closed(playing):
  """Returns when every environment has been closed, or had its time to."""
  await asyncio.gather(*playing.closing)
  return asyncio.get_running_loop().time()


def of_kind(playing, kind):
  return [e for e in playing.log.events if e["kind"] == kind]
