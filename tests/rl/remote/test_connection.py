"""Calls, answers and notices over a pair of sockets in memory."""

import asyncio

import numpy as np
import pytest

from rl.engine import contract
from rl.remote import connection, wire
from tests.helpers import machine_speed


class Pipe:
  """One end of a stream in memory."""

  def __init__(self, incoming: asyncio.Queue, outgoing: asyncio.Queue):
    self._incoming, self._outgoing = incoming, outgoing

  async def send(self, message: bytes) -> None:
    self._outgoing.put_nowait(message)

  async def recv(self) -> bytes:
    message = await self._incoming.get()
    if message is None:
      raise ConnectionResetError("cut")
    return message

  async def close(self) -> None:
    self._outgoing.put_nowait(None)
    self._incoming.put_nowait(None)


def joined(**serving):
  """Returns (asking side, serving side, the serving side's socket)."""
  there, back = asyncio.Queue(), asyncio.Queue()
  socket = Pipe(there, back)
  asking = connection.Connection(Pipe(back, there), name="worker")
  return asking, connection.Connection(socket, name="run", **serving), socket


def play(scenario, **serving):
  """Runs `scenario(asking, serving, socket)` with both sides up."""

  async def whole():
    asking, served, socket = joined(**serving)
    runs = [asyncio.create_task(side.run()) for side in (asking, served)]
    try:
      async with asyncio.timeout(machine_speed.scaled(20)):
        return await scenario(asking, served, socket)
    finally:
      await asking.close()
      await asyncio.wait(runs, timeout=machine_speed.scaled(5))
      assert all(run.done() for run in runs)

  return asyncio.run(whole())


async def double(x):
  return 2 * x


def test_a_call_is_answered():
  async def scenario(asking, *_):
    return await asking.call("double", np.arange(3), deadline_s=5)

  assert play(scenario, serves={"double": double}).tolist() == [0, 2, 4]


def test_calls_run_side_by_side_and_end_in_any_order():
  async def wait(turns):
    for _ in range(turns):
      await asyncio.sleep(0)
    return turns

  async def scenario(asking, *_):
    ended = []

    async def one(turns):
      ended.append(await asking.call("wait", turns, deadline_s=5))

    await asyncio.gather(one(200), one(1))
    return ended

  assert play(scenario, serves={"wait": wait}) == [1, 200]


@pytest.mark.parametrize(
  ("error", "kind", "words"),
  [
    (ValueError("no such id"), ValueError, "no such id"),
    (contract.EngineClosed("over"), contract.EngineClosed, "over"),
    (KeyError("x"), connection.Failed, "worker raised KeyError in 'fail'"),
  ],
  ids=lambda x: getattr(x, "__name__", None),
)
def test_an_error_is_raised_at_the_caller(error, kind, words):
  async def fail():
    raise error

  async def scenario(asking, *_):
    with pytest.raises(kind, match=words):
      await asking.call("fail", deadline_s=5)
    return await asking.call("double", 4, deadline_s=5)

  assert play(scenario, serves={"fail": fail, "double": double}) == 8


def test_items_come_one_by_one_and_closing_ends_them_there():
  closed = []

  async def count():
    try:
      for i in range(1000):
        yield i
        await asyncio.sleep(0)
    finally:
      closed.append(True)

  async def scenario(asking, *_):
    items, found = asking.items("count", deadline_s=5), []
    async for item in items:
      found.append(item)
      if item == 2:
        break
    await items.aclose()
    while not closed:
      await asyncio.sleep(0.001)
    return found

  assert play(scenario, serves={"count": count}) == [0, 1, 2]


def test_cancelling_a_call_cancels_its_handler():
  began, ended = asyncio.Event(), []

  async def hang():
    began.set()
    try:
      await asyncio.sleep(100)
    except asyncio.CancelledError:
      ended.append("cancelled")
      raise

  async def scenario(asking, *_):
    call = asyncio.create_task(asking.call("hang", deadline_s=50))
    await began.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
      await call
    while not ended:
      await asyncio.sleep(0.001)
    return ended

  assert play(scenario, serves={"hang": hang}) == ["cancelled"]


def test_nothing_overtakes_anything():
  heard = []

  async def begin(number):
    heard.append(("call", number))
    await asyncio.sleep(0.01)

  async def scenario(asking, *_):
    calls = []
    for i in range(5):
      calls.append(asyncio.create_task(asking.call("begin", i, deadline_s=5)))
      await asyncio.sleep(0)
      asking.post("tell", i)
    await asyncio.gather(*calls)

  tell = {"tell": lambda number: heard.append(("notice", number))}
  play(scenario, serves={"begin": begin}, hears=tell)
  assert heard == [(kind, i) for i in range(5) for kind in ("call", "notice")]


def test_a_notice_of_a_later_message_finds_the_call_begun():
  heard = []

  async def begin():
    heard.append("call")

  async def scenario(asking, served, _):
    call = asyncio.create_task(asking.call("begin", deadline_s=5))
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # It is sent, and a message of its own.
    asking.post("tell")
    await call

  both = {"serves": {"begin": begin}, "hears": {"tell": heard.append}}
  both["hears"] = {"tell": lambda: heard.append("notice")}
  play(scenario, **both)
  assert heard == ["call", "notice"]


def test_a_notice_before_an_answer_arrives_before_it():
  heard = []

  async def scenario(asking, served, _):
    asking._hears = {"tell": heard.append}
    # Posted when the handler has ended, and still before its answer.
    served._before_answering = lambda: served.post("tell", "first")
    await asking.call("double", 1, deadline_s=5)
    return list(heard)

  assert play(scenario, serves={"double": double}) == ["first"]


def test_a_deadline_names_who_and_what():
  async def hang():
    await asyncio.sleep(100)

  async def scenario(asking, *_):
    with pytest.raises(
      connection.Lost, match=r"worker has not answered 'hang' in 0\.05 s"
    ):
      await asking.call("hang", deadline_s=0.05)

  play(scenario, serves={"hang": hang})


def test_a_cut_stream_ends_all_that_waits_and_what_is_served():
  ended = []

  async def hang():
    try:
      await asyncio.sleep(100)
    finally:
      ended.append(True)

  async def scenario(asking, served, socket):
    calls = [
      asyncio.create_task(asking.call("hang", deadline_s=50)) for _ in range(3)
    ]
    await asyncio.sleep(0.01)
    await socket.close()
    errors = await asyncio.gather(*calls, return_exceptions=True)
    with pytest.raises(connection.Lost, match="worker is gone"):
      await asking.call("hang", deadline_s=50)
    asking.post("dropped")
    await served.lost.wait()
    await asyncio.sleep(0.01)
    return errors

  errors = play(scenario, serves={"hang": hang})
  assert [type(error) for error in errors] == [connection.Lost] * 3
  assert "ConnectionResetError('cut')" in str(errors[0])
  assert ended == [True] * 3


@pytest.mark.parametrize(
  "garbage", [b"\xc1", wire.pack(("call",)), wire.pack((("what",),)), "text"]
)
def test_garbage_ends_the_stream_and_names_it(garbage):
  async def scenario(asking, served, socket):
    socket._incoming.put_nowait(garbage)
    await served.lost.wait()
    # Nobody closes the stream, so that no answer comes.
    with pytest.raises(connection.Lost):
      await asking.call("double", 1, deadline_s=0.1)

  play(scenario, serves={"double": double})


def test_what_is_sent_at_one_moment_may_be_larger_than_a_piece(monkeypatch):
  monkeypatch.setattr(connection, "_PIECE", 1000)

  async def scenario(asking, *_):
    arrays = [np.arange(i, i + 500) for i in range(20)]
    calls = (asking.call("double", array, deadline_s=5) for array in arrays)
    doubled = await asyncio.gather(*calls)
    return [
      np.array_equal(b, 2 * a) for a, b in zip(arrays, doubled, strict=True)
    ]

  assert play(scenario, serves={"double": double}) == [True] * 20


def test_a_message_without_end_is_refused(monkeypatch):
  monkeypatch.setattr(connection, "_MAX_BYTES", 1000)

  async def scenario(asking, served, socket):
    for _ in range(11):
      await socket.send(b"\1" + bytes(99))
    await asking.lost.wait()
    with pytest.raises(connection.Lost, match="more than 1000 bytes"):
      await asking.call("double", 1, deadline_s=5)

  play(scenario, serves={"double": double})


def test_who_takes_nothing_for_a_while_is_lost(monkeypatch):
  monkeypatch.setattr(connection, "_SEND_S", 0.05)

  async def scenario(asking, *_):
    with pytest.raises(connection.Lost, match=r"taken nothing for 0\.05 s"):
      await asking.call("double", 1, deadline_s=float("inf"))

  async def never(self, message):
    await asyncio.Event().wait()

  monkeypatch.setattr(Pipe, "send", never)
  play(scenario, serves={"double": double})
