"""Tests of hand-overs: shared, aborted, and failed in every way."""

import asyncio
import contextlib

import pytest

from models.chat import word_chat
from rl.audit import event_log
from rl.engine import contract
from rl.pools import affinity, hand_over, placement, router
from rl.testing import scripted_engine
from tests.helpers import pools_under_test as pools

pytestmark = pytest.mark.virtual_time

INFOS = (
  placement.EngineInfo("decode"),
  placement.EngineInfo("encode", "any", "prefill"),
)
LOST = contract.EngineClosed("it broke")


class Phased(scripted_engine.ScriptedEngine):
  """A scripted engine that takes a second to encode, and one to be given ids.

  Attributes:
    asked: (ids, start) of the prompts that it was to encode.
    kept: prefixes that are there for others now.
    taken: ids of the prefixes that it was given.
    wrong: raised, or the reason for which it takes or has none.
  """

  def __init__(self, *args, **kwargs):
    super().__init__(*args, **kwargs)
    self.asked, self.kept, self.taken = [], 0, []
    self.wrong: Exception | str = ""

  async def _work(self):
    await asyncio.sleep(1.0)
    if isinstance(self.wrong, Exception):
      raise self.wrong

  @contextlib.asynccontextmanager
  async def export_prefix(self, ids, start=0, priority=()):
    self.asked.append((len(ids), start))
    await self._work()
    self.kept += 1
    try:
      num_bytes = 0 if self.wrong else len(ids)
      yield contract.PrefixPages(ids, start, self.version, num_bytes, [])
    finally:
      self.kept -= 1

  async def import_prefix(self, prefix):
    await self._work()
    if not self.wrong:
      self.taken.append(len(prefix.ids))
    return str(self.wrong)


def phases(log=None):
  """Returns a router over an engine that decodes and one that encodes."""
  say = scripted_engine.one_of((5, 6), word_chat.END)
  decode, encode = Phased(say), Phased(say)
  routing = affinity.Routing(min_prefill_ids=4)
  engines = [decode, encode]
  pooled = router.Router(engines, infos=INFOS, routing=routing, log=log)
  return pooled, decode, encode


def ask(pooled, name="a", session=None, ids=(3, 1, 4, 1, 5)):
  return pooled.generate(pools.request(name, session, ids))


async def test_a_session_is_encoded_elsewhere_and_goes_on_with_what_is_new():
  pooled, decode, encode = phases()
  assert await pooled.begin("a", "") == 0
  ids = (3, 1, 4, 1, 5, *(await ask(pooled)).tokens.tolist())
  await ask(pooled, "b", "a", (*ids, 2))  # One id: too few.
  await ask(pooled, "c", "a", (*ids, 2, 6, 5, 3, 5, 8, 9))
  assert (len(decode.requests), encode.requests) == (3, [])
  described = pooled.describe()
  assert described["prefills"] == 2.0
  assert described["hand_over_s"] == pytest.approx(4.0)
  assert described["hand_over_bytes"] == 5 + 14
  # 8 ids and 2 sampled were there, of the last of which nothing is kept.
  assert (encode.asked, decode.taken) == ([(5, 0), (14, 9)], [5, 14])


async def test_requests_of_one_prompt_share_a_hand_over():
  pooled, decode, encode = phases()
  for name in "abc":
    await pooled.begin(name, "", group="g")
  asked = [asyncio.create_task(ask(pooled, name)) for name in "abc"]
  await asyncio.sleep(0.5)
  assert pooled.begun("a") is None
  asked[0].cancel()
  pooled.abort("b")
  assert (await asked[1]).stop == "abort"
  assert (await asked[2]).stop == "stop"
  assert [request.request_id for request in decode.requests] == ["c"]
  assert (encode.asked, decode.taken) == ([(5, 0)], [5])


@pytest.mark.parametrize("late_s", [0.5, 1.5], ids=["encoded", "taken"])
@pytest.mark.parametrize("how", ["abort", "cancel"])
async def test_a_hand_over_that_nobody_waits_for_ends_and_keeps_nothing(
  late_s, how
):
  pooled, decode, encode = phases()
  await pooled.begin("a", "")
  asked = asyncio.create_task(ask(pooled))
  await asyncio.sleep(late_s)
  if how == "cancel":
    asked.cancel()
  else:
    pooled.abort("a")
    assert (await asked).stop == "abort"
  await asyncio.sleep(5.0)
  assert await pooled.leave(1)  # Nothing is asked of it.
  assert (encode.kept, decode.taken, decode.requests) == (0, [], [])


@pytest.mark.parametrize(
  ("encodes", "wrong", "reason"),
  [
    (True, LOST, "lost: it broke"),
    (True, ValueError("no such id"), "failed: no such id"),
    (True, "empty", "evicted"),
    (False, "version", "version"),
    (False, LOST, "failed: it broke"),
    (False, ValueError("cut short"), "failed: cut short"),
  ],
)
async def test_a_failure_is_counted_and_named_and_costs_no_answer(
  encodes, wrong, reason
):
  log = event_log.EventLog()
  pooled, decode, encode = phases(log)
  (encode if encodes else decode).wrong = wrong
  await pooled.begin("a", "")
  assert (await ask(pooled)).stop == "stop"
  assert (encode.kept, decode.taken) == (0, [])
  assert pooled.lost(1) == (encodes and wrong is LOST)
  described = pooled.describe()
  assert described["prefills"] == 0.0
  assert described[f"prefills_missed/{reason.partition(':')[0]}"] == 1.0
  (told,) = event_log.of_kind(log.events, "prefill_missed")
  assert (told["session"], told["engine"], told["reason"]) == ("a", 1, reason)


async def test_a_hand_over_that_takes_too_long_is_given_up(monkeypatch):
  monkeypatch.setattr(hand_over, "_LIMIT_S", 1.5)

  pooled, decode, encode = phases()
  await pooled.begin("a", "")
  assert (await ask(pooled)).stop == "stop"
  assert (encode.kept, decode.taken) == (0, [])
  assert pooled.describe()["prefills_missed/late"] == 1.0


async def test_an_engine_that_encodes_keeps_no_run_open_alone():
  pooled, decode, _ = phases()
  await pooled.begin("a", "")
  await decode.close()
  with pytest.raises(contract.EngineClosed, match="engines have stopped"):
    await ask(pooled)
  with pytest.raises(contract.EngineClosed, match="engines have stopped"):
    await pooled.begin("b", "")


async def test_a_request_right_behind_an_aborted_one_shares_no_end_of_it():
  pooled, _, _ = phases()
  for session in ("a", "b"):
    await pooled.begin(session, "")
  first = asyncio.create_task(ask(pooled, "a"))
  await asyncio.sleep(0.5)
  pooled.abort("a")
  assert (await first).stop == "abort"
  # The same prompt, of another member of its group and of its own again.
  assert all([(await ask(pooled, name)).tokens.tolist() for name in ("b", "a")])


async def test_a_session_moves_whose_engine_came_back_newer_in_a_hand_over():
  pooled, _, _ = phases()
  pooled.on_lost = lambda number, reason: None
  await pooled.begin("a", "")
  ids = (3, 1, 4, 1, 5, *(await ask(pooled)).tokens.tolist())
  second = asyncio.create_task(
    ask(pooled, "b", "a", (*ids, 2, 6, 5, 3, 5, 8, 9))
  )
  await asyncio.sleep(0.5)  # It is encoded elsewhere.
  pooled._lose(0, pooled.engines[0], "it broke")
  await pooled.update_weights(1, 1, None, "drain")
  again = Phased(scripted_engine.one_of((5, 6), word_chat.END))
  await again.start(None, 1)
  pooled.recover(0, again)
  with pytest.raises(ValueError, match="version 0"):
    await second
