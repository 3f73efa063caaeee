"""The simulated engine: processor sharing in virtual time, worked out by hand.

Unless a test says otherwise a token takes 0.01 (1 + b / 10) seconds.
"""

import asyncio

import numpy as np
import pytest

from rl.engine import contract
from rl.runtime import virtual_clock
from rl.simulation import engine as simulated_engine
from rl.simulation import processor as simulated_processor

pytestmark = pytest.mark.virtual_time


def speed(**fields):
  return simulated_processor.Speed(
    **{"tau0_s": 0.01, "b0": 10.0, "slots": 8, "kv_tokens": 100_000} | fields
  )


def request(name, tokens=10, max_tokens=1 << 15, session="", priority=()):
  """Returns a request whose answer is as long as the number in its name."""
  return contract.DecodeRequest(
    request_id=name,
    session=session or name,
    tokens=np.zeros(tokens, np.int32),
    max_tokens=max_tokens,
    priority=priority,
  )


def length(asked):
  return int(asked.request_id.split("/")[-1])


def simulated(**fields):
  return simulated_engine.SimulatedEngine(speed(**fields), length)


def now():
  return asyncio.get_running_loop().time()


def close(seconds):
  return pytest.approx(seconds, abs=1e-5)


async def ended(served, asked):
  """Returns the completion and the second in which it came."""
  return await served.generate(asked), now()


async def test_one_sequence_takes_tau_of_1_a_token():
  completion, at_s = await ended(simulated(), request("a/100"))
  assert at_s == close(100 * 0.011)
  assert len(completion.tokens) == 100
  assert completion.stop == "stop"
  assert completion.decode_s == close(1.1)
  assert completion.versions.tolist() == [0] * 100


async def test_sequences_share_the_processor():
  served = simulated()
  asked = [request("a/100"), request("b/200")]
  (_, first_s), (_, second_s) = await asyncio.gather(
    *(ended(served, x) for x in asked)
  )
  # 100 tokens of both at 0.012 s, then 100 of the second at 0.011 s.
  assert first_s == close(1.2)
  assert second_s == close(1.2 + 1.1)
  assert served.served == pytest.approx(300.0, abs=1e-3)
  assert served.stats().sampled_tokens == 300


async def test_who_comes_later_slows_down_who_is_there():
  served = simulated()
  first = asyncio.create_task(ended(served, request("a/100")))
  await asyncio.sleep(0.55)  # 50 tokens at 0.011 s.
  second = asyncio.create_task(ended(served, request("b/10")))
  first_s = (await first)[1]
  second_s = (await second)[1]
  assert second_s == close(0.55 + 10 * 0.012)
  assert first_s == close(0.55 + 10 * 0.012 + 40 * 0.011)


async def test_more_than_the_slots_wait_and_go_by_priority():
  served = simulated(slots=1)
  order = []

  async def one(name, priority):
    await served.generate(request(name, priority=priority))
    order.append(name)

  async with asyncio.TaskGroup() as tasks:
    for name, rank in (("a/10", 5), ("b/10", 3), ("c/10", 1), ("d/10", 2)):
      tasks.create_task(one(name, (rank,)))
      await asyncio.sleep(0)
    await asyncio.sleep(0)
    stats = served.stats()
    assert (stats.running, stats.waiting) == (1, 3)
  at_s = now()
  assert order == ["a/10", "c/10", "d/10", "b/10"]
  assert at_s == close(4 * 10 * 0.011)


async def test_a_request_waits_until_there_is_room_for_all_its_ids():
  # 10 + 100 ids are set aside by each: only one fits.
  served = simulated(kv_tokens=150)
  asked = [request("a/100"), request("b/100")]
  (_, first_s), (completion, second_s) = await asyncio.gather(
    *(ended(served, x) for x in asked)
  )
  assert (first_s, second_s) == (close(1.1), close(2.2))
  assert completion.first_token_s == completion.queue_s == close(1.1)


async def test_what_never_fits_is_refused_and_others_go_on():
  served = simulated(kv_tokens=150)
  with pytest.raises(ValueError, match="do not fit kv_tokens=150"):
    await served.generate(request("a/200"))
  assert (await served.generate(request("b/20"))).stop == "stop"


async def test_an_answer_is_cut_at_max_tokens():
  completion, at_s = await ended(simulated(), request("a/100", max_tokens=30))
  assert (len(completion.tokens), completion.stop) == (30, "length")
  assert at_s == close(30 * 0.011)


async def test_context_is_encoded_first_and_one_request_at_a_time():
  served = simulated(prefill_per_s=100.0)
  asked = [request("a/10", tokens=50), request("b/10", tokens=100)]
  (first, first_s), (second, second_s) = await asyncio.gather(
    *(ended(served, x) for x in asked)
  )
  # Encoded at 0.5 and 1.5 s; each then decodes alone.
  assert first.first_token_s == close(0.5)
  assert second.first_token_s == close(1.5)
  assert first.queue_s == second.queue_s == 0.0  # Both have a slot at once.
  assert (first_s, second_s) == (close(0.61), close(1.61))


async def test_a_session_encodes_only_what_is_new():
  served = simulated(prefill_per_s=100.0)
  await served.generate(request("a/10", tokens=50, session="s"))
  start = now()
  again = request("b/10", tokens=80, session="s")
  completion = await served.generate(again)
  seconds = now() - start
  stats = served.stats()
  # 50 + 10 ids were known but for the last, which was never fed: 21 are new.
  assert completion.cached_tokens == 59
  assert seconds == close(0.21 + 0.11)
  assert (stats.prefilled_tokens, stats.cached_tokens) == (71, 59)


async def test_what_nobody_uses_is_forgotten_for_who_comes():
  served = simulated(kv_tokens=200)
  await served.generate(request("a/50", session="s"))
  await served.generate(request("b/180", session="t"))
  again = await served.generate(request("c/10", tokens=70, session="s"))
  assert again.cached_tokens == 0


async def test_an_aborted_request_keeps_what_it_has():
  served = simulated()
  first = asyncio.create_task(ended(served, request("a/100")))
  second = asyncio.create_task(ended(served, request("b/100")))
  await asyncio.sleep(0.6)  # 50 tokens of each; the 51st is on its way.
  served.abort("a/100")
  (aborted, at_s) = await first
  (whole, second_s) = await second
  assert (aborted.stop, len(aborted.tokens)) == ("abort", 51)
  assert at_s == close(0.6)
  assert len(whole.tokens) == 100
  assert second_s == close(0.6 + 50 * 0.011)


async def test_aborting_all_ends_those_that_wait_without_tokens():
  served = simulated(slots=1)
  asked = [request("a/100"), request("b/100")]
  both = asyncio.gather(*(served.generate(x) for x in asked))
  await asyncio.sleep(0.1)
  served.abort(None)
  (first, second) = await both
  stats = served.stats()
  assert (first.stop, second.stop) == ("abort", "abort")
  assert (len(first.tokens), len(second.tokens)) == (10, 0)
  assert (stats.running, stats.waiting) == (0, 0)


async def test_a_cancelled_request_leaves_its_slot():
  served = simulated(slots=1)
  first = asyncio.create_task(served.generate(request("a/1000")))
  await asyncio.sleep(0.5)
  first.cancel()
  _, at_s = await ended(served, request("b/10"))
  assert (at_s, first.cancelled()) == (close(0.5 + 0.11), True)


async def test_begun_tells_the_version_of_the_first_token():
  served = simulated(slots=1)
  first = asyncio.create_task(served.generate(request("a/100")))
  second = asyncio.create_task(served.generate(request("b/100")))
  await asyncio.sleep(0.1)
  before = served.begun("a/100"), served.begun("b/100")
  await served.update_weights(1, None, "keep_kv")
  after = served.begun("a/100")
  await asyncio.gather(first, second)
  with pytest.raises(ValueError, match="a/100 is not in flight"):
    served.begun("a/100")
  assert (before, after) == ((0, None), 0)


async def test_versions_change_in_the_middle_of_an_answer():
  served = simulated(update_s=2.0)
  answer = asyncio.create_task(ended(served, request("a/100")))
  await asyncio.sleep(0.11 * 4 + 0.005)  # 40 tokens; the 41st has begun.
  await served.update_weights(1, None, "keep_kv")
  completion, at_s = await answer
  assert completion.versions.tolist() == [0] * 41 + [1] * 59
  assert completion.oldest_kv == 0
  assert at_s == close(1.1 + 2.0)
  assert served.stats().paused_s == close(2.0)


async def test_kept_keys_and_values_serve_only_the_answer_in_flight():
  served = simulated(update_s=1.0)
  await served.generate(request("idle/40", session="idle"))
  answer = asyncio.create_task(served.generate(request("a/100")))
  await asyncio.sleep(0.1)
  await served.update_weights(1, None, "keep_kv")
  await answer
  for name in ("idle", "a"):
    again = request(f"{name}/7", tokens=120, session=name)
    assert (await served.generate(again)).cached_tokens == 0
  last = request("a/8", tokens=130, session="a")
  assert (await served.generate(last)).cached_tokens == 120 + 7 - 1


async def test_recomputing_encodes_all_that_is_in_flight_again():
  served = simulated(prefill_per_s=100.0, update_s=1.0)
  answer = asyncio.create_task(ended(served, request("a/100", tokens=50)))
  await asyncio.sleep(0.5 + 0.11 * 4 + 0.005)
  await served.update_weights(1, None, "recompute")
  completion, at_s = await answer
  assert completion.versions.tolist() == [0] * 41 + [1] * 59
  assert completion.oldest_kv == 1
  # Once 50 ids, and then these and 41 tokens.
  assert at_s == close(0.5 + 1.1 + 1.0 + 0.91)


async def test_draining_lets_running_requests_end_and_others_wait():
  served = simulated(update_s=1.0)
  first = asyncio.create_task(ended(served, request("a/100")))
  await asyncio.sleep(0.1)
  update = asyncio.create_task(served.update_weights(1, None, "drain"))
  await asyncio.sleep(0.1)
  second = asyncio.create_task(ended(served, request("b/100")))
  await update
  (old, old_s) = await first
  (new, new_s) = await second
  assert (old.versions.tolist(), old_s) == ([0] * 100, close(1.1))
  assert (new.versions.tolist(), new_s) == ([1] * 100, close(1.1 + 1.0 + 1.1))


async def test_weights_that_abort_end_what_runs():
  served = simulated()
  answer = asyncio.create_task(served.generate(request("a/100")))
  await asyncio.sleep(0.11)
  await served.update_weights(1, None, "abort")
  completion = await answer
  assert (completion.stop, completion.versions.tolist()) == ("abort", [0] * 11)


async def test_a_version_that_is_not_newer_is_refused():
  served = simulated()
  await served.update_weights(2, "w")
  with pytest.raises(ValueError, match="version 2 is not above"):
    await served.update_weights(2, "x")
  assert (served.params, await served.checksum()) == ("w", (2, 2))


async def test_nothing_decodes_while_paused():
  served = simulated()
  answer = asyncio.create_task(ended(served, request("a/100")))
  await asyncio.sleep(0.5)
  await served.pause()
  await asyncio.sleep(10.0)
  served.resume()
  assert (await answer)[1] == close(11.1)


async def test_a_closed_engine_ends_requests_and_takes_none():
  served = simulated()
  answer = asyncio.create_task(served.generate(request("a/100")))
  await asyncio.sleep(0.1)
  await served.close()
  with pytest.raises(contract.EngineClosed):
    await answer
  with pytest.raises(contract.EngineClosed):
    await served.generate(request("b/100"))


def test_a_stream_has_the_whole_answer_in_its_last_delta():
  async def main():
    return [delta async for delta in simulated().stream(request("a/5"))]

  (delta,) = virtual_clock.run(main())
  assert delta.completion is not None
  assert delta.tokens is delta.completion.tokens


async def test_states_say_what_each_second_went_to():
  served = simulated(update_s=3.0, prefill_per_s=100.0)
  await asyncio.sleep(1.0)
  served.expect(1)
  await served.generate(request("a/100", tokens=200))
  await asyncio.sleep(2.0)
  served.expect(-1)
  await served.update_weights(1, None)
  # No session for 1 s, 2 s of context, 1.1 s of tokens, 2 s elsewhere.
  assert served.states == [
    (0.0, "gate"),
    (close(1.0), "prefill"),
    (close(3.0), "decode"),
    (close(4.1), "environments"),
    (close(6.1), "publish"),
  ]


def test_it_keeps_the_contract_of_an_engine():
  assert isinstance(simulated(), contract.DecodeEngine)


async def test_a_busy_engine_samples_what_its_speed_says():
  served = simulated()
  answers = [served.generate(request(f"{i}/1000")) for i in range(64)]
  await asyncio.gather(*answers)
  # 64 answers of 1000 tokens on 8 slots at 0.018 s: 8 waves of 18 s.
  assert now() == pytest.approx(8 * 18.0)
  assert speed().tokens_per_s == pytest.approx(8 / 0.018)
