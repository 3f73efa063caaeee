"""The built-in engine in virtual time: its dispatches, worked out by hand."""

import asyncio
import dataclasses
import functools

import numpy as np
import pytest

from models import config as model_config
from models import sharding
from rl.engine import contract
from rl.engine.builtin import settings as engine_settings
from rl.runtime import virtual_clock
from rl.simulation import dispatched_engine, host_thread

close = functools.partial(pytest.approx, abs=1e-3)
ANSWER = np.array([7, 8], np.int32)


def dispatches(dispatch_s=1.0):
  """Returns dispatches of 4 rows, each of up to 4 new ids and 2 tokens."""
  return dispatched_engine.Dispatches(
    settings=engine_settings.EngineSettings(
      slots=8,
      row_buckets=(4,),
      chunk_buckets=(4,),
      prefill_tokens=16,
      steps_per_dispatch=2,
      batching_delay_s=0.0,
    ),
    model=model_config.tiny_moe(max_length=64),
    layout=sharding.Layout(sharding.make_mesh(1, 1, 1)),
    dispatch_s=dispatch_s,
  )


def request(number, tokens, max_tokens=2):
  return contract.DecodeRequest(
    request_id=f"train/{number}/0/0/0",
    session=f"train/{number}/0/0",
    tokens=np.asarray(tokens, np.int32),
    max_tokens=max_tokens,
  )


def play(main, answer=ANSWER, encode_s=None, **work):
  """Returns what `main` returns, given an engine and its host's thread."""

  async def run():
    host = host_thread.HostThread(host_thread.HostWork(**work))
    engine = dispatched_engine.DispatchedEngine(
      dataclasses.replace(dispatches(), encode_s=encode_s),
      lambda request: (request.tokens, answer),
      host,
    )
    await engine.start(0, 0)  # pyright: ignore[reportArgumentType]
    found = await main(engine, host)
    await engine.close()
    return found

  return virtual_clock.run(run())


async def end_s(engine, asked):
  await engine.generate(asked)
  return asyncio.get_running_loop().time()


def test_rows_beyond_a_dispatch_wait_for_the_next():
  async def main(engine, host):
    asked = [request(n, [n, n]) for n in range(6)]
    return await asyncio.gather(*(end_s(engine, one) for one in asked))

  assert play(main) == close([1.0] * 4 + [2.0] * 2)


def test_a_conversation_that_another_continues_is_encoded_again():
  async def main(engine, host):
    await asyncio.gather(
      *(engine.generate(request(n, [1, 2])) for n in range(2))
    )
    # 5 of these ids are 4 of a chunk, and 1 in the dispatch after; the page
    # that is not full goes to the first, who feeds the last 2 of them.
    longer = [1, 2, *ANSWER, 3]
    started_s = asyncio.get_running_loop().time()
    asked = [request(n, longer) for n in range(2, 4)]
    ends = await asyncio.gather(*(end_s(engine, one) for one in asked))
    return [end - started_s for end in ends]

  assert play(main) == close([1.0, 2.0])


def test_an_answer_has_its_ids_and_ends_with_the_last():
  async def main(engine, host):
    return await engine.generate(request(0, [1, 2], max_tokens=5))

  completion = play(main, np.array([7, 8, 9], np.int32))
  assert completion.tokens.tolist() == [7, 8, 9]
  assert completion.stop == "stop"
  # 2 tokens in the first dispatch, the last in a second.
  assert completion.decode_s == close(2.0)


def test_a_dispatch_that_encodes_may_take_longer():
  async def main(engine, host):
    return await engine.generate(request(0, [1, 2], max_tokens=5))

  completion = play(main, np.array([7, 8, 9], np.int32), encode_s=3.0)
  # 3 s for 2 new ids and 2 tokens, then 1 s for the last, whose id is sampled.
  assert completion.decode_s == close(4.0)


def test_a_result_waits_while_groups_are_packed():
  async def main(engine, host):
    busy = asyncio.create_task(host.pack(3))
    ended_s = await end_s(engine, request(0, [1, 2]))
    await busy
    return ended_s

  # The dispatch ends at 1 s, and packing, which began at 0 s, at 3 s.
  assert play(main, group_s=1.0) == close(3.0)


def test_an_idle_engine_finds_the_requests_of_all_turns_under_way():
  async def asked(engine, host, number):
    await host.turn()
    return await end_s(engine, request(number, [number, number]))

  async def main(engine, host):
    turns = [asked(engine, host, n) for n in range(1, 4)]
    return await asyncio.gather(end_s(engine, request(0, [0, 0])), *turns)

  # All turns end at 3 x 0.1 s: one dispatch for them and the first request.
  assert play(main, turn_s=0.1) == close([1.3] * 4)


def test_states_are_those_of_the_mesh():
  async def main(engine, host):
    engine.expect(sessions=1)
    await engine.generate(request(0, [1, 2]))
    await asyncio.sleep(1.0)
    engine.expect(sessions=-1, graded=1)
    await engine.generate(request(1, [1, 2]))
    return engine.states, engine.served

  states, served = play(main)
  names = ("decode", "environments", "decode", "rewards")
  assert [name for _, name in states] == [*names]
  assert [at_s for at_s, _ in states] == close([0.0, 1.0, 2.0, 3.0])
  assert served == 4


def test_a_dispatch_takes_time():
  with pytest.raises(ValueError, match="dispatch_s"):
    dataclasses.replace(dispatches(), dispatch_s=0.0).validate("pool")
