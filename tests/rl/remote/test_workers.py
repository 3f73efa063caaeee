"""Who may connect, and workers that never do."""

import asyncio
import functools
import os
import socket
from typing import Any, cast

import pytest
import websockets
from websockets.asyncio import client

from rl.backends import contract, local
from rl.remote import connection, wire, workers
from tests.helpers import machine_speed
from twinmesh import error_codes


def play(scenario):
  """Runs `scenario(workers, address)` and ends what is left."""

  async def whole():
    others = workers.Workers(None)
    try:
      async with asyncio.timeout(machine_speed.scaled(60)):
        return await scenario(others, await others.listen())
    finally:
      await others.close()

  return asyncio.run(whole())


def expect(others, name="engine 0"):
  """Returns the future connection of a worker that nobody has started."""
  admitted = asyncio.get_running_loop().create_future()
  others._expected[name] = workers._Expected("a task", {}, admitted)
  return admitted


async def why_closed(socket) -> str:
  with pytest.raises(websockets.ConnectionClosed) as closed:
    await socket.recv()
  assert closed.value.rcvd is not None
  return closed.value.rcvd.reason


@pytest.mark.parametrize("address", ["192.0.2.1", "10.0.0..2", "2001:db8::1"])
def test_an_address_of_another_host_is_refused(address):
  class Elsewhere(local.Local):
    def open(self, folder):
      launcher = local.LocalLauncher()
      launcher.host = address
      return launcher

  with pytest.raises(
    contract.Unreachable, match="this host can listen"
  ) as error:
    workers.Workers(None, backend=Elsewhere())
  assert error_codes.code_of(error.value) == "TM-P04"


def test_a_worker_with_the_token_is_told_its_task_and_may_be_asked():
  async def double(x):
    return 2 * x

  async def scenario(others, address):
    admitted = expect(others)
    socket, task = await workers.connect(address, others.token, "engine 0")
    serving = connection.Connection(
      socket, name="the run", serves={"double": double}
    )
    run = asyncio.create_task(serving.run())
    answer = await (await admitted).call("double", 21, deadline_s=5)
    await serving.close()
    await run
    return task, answer

  assert play(scenario) == ("a task", 42)


@pytest.mark.parametrize("given", [None, "", "0" * 64])
def test_nobody_without_the_token_is_heard(given):
  async def scenario(others, address):
    admitted = expect(others)
    token = {} if given is None else {"Authorization": f"Bearer {given}"}
    with pytest.raises(websockets.InvalidStatus, match="HTTP 401"):
      await client.connect(address, additional_headers=token, proxy=None)
    return admitted.done()

  assert play(scenario) is False


def test_a_worker_that_is_refused_says_so_in_words():
  async def scenario(others, address):
    del others
    with pytest.raises(workers.NotStarted, match=r"cannot join .* 401"):
      await workers.connect(address, "0" * 64, "engine 0")

  play(scenario)


@pytest.mark.parametrize(
  ("hello", "words"),
  [
    (b"\xc1 garbage", "it cannot be read"),
    ("text", "it cannot be read"),
    (wire.pack({"name": "engine 0"}), "no worker of this name is expected"),
    (
      wire.pack({"name": "engine 7", "code": workers.code_version()}),
      "no worker of this name is expected",
    ),
    (
      wire.pack({"join": "decode", "code": "older", "pid": 3}),
      "process 3 on 127.0.0.1 runs version older of the code, not",
    ),
    (
      wire.pack({"join": "decode", "code": workers.code_version()}),
      "no worker of this name is expected",
    ),
    (
      wire.pack({"name": "engine 0", "code": "older"}),
      "engine 0 runs version older of the code, not",
    ),
  ],
)
def test_whoever_is_not_expected_is_refused_and_others_go_on(hello, words):
  async def scenario(others, address):
    admitted = expect(others)
    bearer = {"Authorization": f"Bearer {others.token}"}
    async with client.connect(
      address, additional_headers=bearer, proxy=None
    ) as stranger:
      await stranger.send(hello)
      assert words in await why_closed(stranger)
    assert not admitted.done()
    socket, _ = await workers.connect(address, others.token, "engine 0")
    await admitted
    await socket.close()

  play(scenario)


def guests_of(others):
  """Returns a queue of the guests, and of the pools that they ask for."""
  guests = asyncio.Queue()
  others.on_guest = lambda pool, guest: guests.put_nowait((pool, guest))
  return guests


def test_a_guest_waits_for_its_task_and_may_then_be_asked():
  async def double(x):
    return 2 * x

  async def scenario(others, address):
    guests, heard = guests_of(others), []
    joining = asyncio.create_task(workers.join(address, others.token, "wide"))
    pool, guest = await guests.get()
    assert (pool, guest.pid) == ("wide", os.getpid())
    assert not joining.done()
    stream = await guest.start(
      "engine 7", "a task", hears={"said": heard.append}
    )
    socket, name, task = await joining
    serving = connection.Connection(
      socket, name="the run", serves={"double": double}
    )
    run = asyncio.create_task(serving.run())
    serving.post("said", "hello")
    answer = await stream.call("double", 21, deadline_s=5)
    await stream.close()
    await guest.end(gently=True)
    await run
    return name, task, answer, heard, socket.close_code

  assert play(scenario) == ("engine 7", "a task", 42, ["hello"], 1000)


def test_a_guest_that_cannot_start_is_told_so():
  async def scenario(others, address):
    guests = guests_of(others)
    joining = asyncio.create_task(workers.join(address, others.token, "wide"))
    _, guest = await guests.get()
    await guest.refuse("it could not start")
    with pytest.raises(workers.Refused, match=r"refuses: it could not start$"):
      await joining

  play(scenario)


def test_a_guest_that_is_gone_before_it_has_a_task_does_not_start():
  async def scenario(others, address):
    guests = guests_of(others)
    bearer = {"Authorization": f"Bearer {others.token}"}
    hello = {"join": "wide", "pid": 3, "code": workers.code_version()}
    async with client.connect(
      address, additional_headers=bearer, proxy=None
    ) as socket:
      await socket.send(wire.pack(hello))
      _, guest = await guests.get()
    with pytest.raises(
      workers.NotStarted, match=r"process 3 on 127.* has ended"
    ):
      await guest.start("engine 7", "a task", hears={})

  play(scenario)


def test_a_guest_is_refused_with_the_reason(monkeypatch):
  async def scenario(others, address):
    def join(token=others.token, at=address):
      return workers.join(at, token, "wide")

    with pytest.raises(workers.Refused, match="takes no engines now"):
      await join()

    def full(pool, guest):
      raise ValueError(f"pool {pool} cannot be joined; use decode")

    others.on_guest = full
    with pytest.raises(workers.Refused, match="pool wide cannot be joined"):
      await join()
    with pytest.raises(workers.Refused, match="pool üü"):
      await workers.join(address, others.token, "ü" * 200)
    with pytest.raises(
      workers.Refused, match="has another token: it was started"
    ):
      await join(token="another")
    with pytest.raises(workers.Refused, match="the run has ended"):
      await join(at="ws://127.0.0.1:9")
    monkeypatch.setattr(workers, "_HELLO_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
      port = silent.getsockname()[1]
      with pytest.raises(
        workers.Refused, match=r"cannot be reached: timed out"
      ):
        await join(at=f"ws://127.0.0.1:{port}")

  play(scenario)


def test_a_message_beyond_the_limit_ends_its_stream_alone():
  async def scenario(others, address):
    first, second = expect(others, "a"), expect(others, "b")
    flood, _ = await workers.connect(address, others.token, "a")
    quiet, _ = await workers.connect(address, others.token, "b")
    await flood.send(bytes(workers.MAX_MESSAGE + 1))
    await (await first).lost.wait()
    await quiet.close()
    return (await second).lost.is_set()

  assert play(scenario) is False


def test_a_start_that_is_cancelled_as_its_process_connects_ends_it():
  class Started:
    ended = is_killed = False

    def kill(self):
      self.is_killed = True

  async def scenario(others, _):
    started = Started()
    others._spawn = lambda *told: started
    start = asyncio.create_task(
      others.start("engine 0", "", environment={}, hears={}, deadline_s=50)
    )
    while "engine 0" not in others._expected:
      await asyncio.sleep(0)
    others._expected["engine 0"].admitted.set_result(None)
    start.cancel()
    await asyncio.wait([start])
    return start.cancelled(), started.is_killed

  assert play(scenario) == (True, True)


def test_a_log_without_last_words_is_told(tmp_path):
  class Ended:
    reason = ""
    place = "10.0.0.2:7000"

    def code(self):
      return -9

  log = tmp_path / "engine_0.log"
  worker = workers.Worker("engine 0", cast(Any, Ended()), log)
  start = f"engine 0 on 10.0.0.2:7000 ended with code -9; its log, {log}, "
  assert worker.last_words() == start + "is gone"
  log.touch()
  assert worker.last_words() == start + "is empty"
  log.write_text("a\nb\n")
  assert worker.last_words() == start + "ends:\na\nb"


@pytest.mark.process
def test_a_worker_that_ends_at_once_is_told_with_its_last_words():
  async def scenario(others, _):
    with pytest.raises(
      workers.NotStarted,
      match=r"(?s)engine 0 ended with code 1; its log, .*engine_0.log, ends:"
      r".*encodings",
    ):
      await others.start(
        "engine 0",
        "{}",
        environment={"PYTHONHOME": "/nowhere"},
        hears={},
        deadline_s=50,
      )

  play(scenario)


@pytest.mark.process
def test_a_worker_has_the_python_that_is_named_and_words_of_its_own(tmp_path):
  other = tmp_path / "python"
  other.write_text('#!/bin/sh\necho "other: $*"\nexit 3\n')
  other.chmod(0o755)

  async def scenario(others, _):
    start = functools.partial(
      others.start,
      "engine 0",
      "{}",
      environment={},
      hears={},
      deadline_s=50,
      python=str(other),
    )
    with pytest.raises(
      workers.NotStarted, match=r"(?s)code 3; .*other: -m launch\.worker"
    ):
      await start()

    other.unlink()
    with pytest.raises(workers.NotStarted) as error:
      await start()
    # Of this process: the one before has said something.
    assert "it cannot be started" in str(error.value)
    assert str(error.value).endswith("is empty")

  play(scenario)


@pytest.mark.process
def test_a_worker_that_does_not_connect_in_time_is_ended():
  async def scenario(others, _):
    with pytest.raises(
      workers.NotStarted, match=r"engine 0 has not connected in 0\.01 s"
    ):
      await others.start(
        "engine 0", "{}", environment={}, hears={}, deadline_s=0.01
      )
    return [worker.ended for worker in others._children]

  assert play(scenario) == [True]
