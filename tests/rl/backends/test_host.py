"""A host that starts programs: for whom, how many, and until when."""

import contextlib
import dataclasses
import signal
import socket
import socketserver
import tempfile
import threading
import time

import pytest

from launch import sweep
from rl.backends import addresses, contract, host
from tests.helpers import backends_under_test as under_test

pytestmark = pytest.mark.process
WAITS = "import sys; print('here', flush=True); sys.stdin.read()"


@pytest.mark.parametrize(
  ("text", "mode", "words"),
  [
    ("0" * 64, 0o644, "can be read by others, .*; use chmod 600"),
    ("short", 0o600, "has 5 characters; use 16 or more"),
  ],
)
def test_a_token_that_is_no_secret_is_refused(tmp_path, text, mode, words):
  path = tmp_path / "token"
  path.write_text(text)
  path.chmod(mode)
  with pytest.raises(ValueError, match=words):
    host.read_token(path)
  with pytest.raises(ValueError, match="cannot be read: No such file"):
    host.read_token(tmp_path / "absent")


def test_a_token_that_is_no_text_is_refused(tmp_path):
  path = tmp_path / "token"
  path.touch(0o600)
  path.write_bytes(b"\xff" * 40)
  with pytest.raises(ValueError, match=f"{path} cannot be read: it is no text"):
    host.read_token(path)


@pytest.mark.parametrize(
  "text",
  [
    *("10.0.0.2", ":7", "h:x", "h:70000", "h:²", "h:٣", ""),
    *("10.0.0..2:7", f"{'h' * 64}:7"),
  ],
)
def test_what_is_no_address_is_refused(text):
  with pytest.raises(ValueError, match="is no address; use HOST:PORT"):
    host.address_of(text, "at")
  assert host.address_of("[::1]:7000", "at") == ("::1", 7000)


def has_ipv6() -> bool:
  try:
    socket.create_server(("::1", 0), family=socket.AF_INET6).close()
  except OSError:
    return False
  return True


@pytest.mark.skipif(not has_ipv6(), reason="without IPv6")
def test_a_host_listens_at_an_address_of_ipv6():
  server = host.Host(("::1", 0), under_test.TOKEN, 1)
  assert server.address == f"[::1]:{server.server_address[1]}"
  assert host.address_of(server.address, "at")[0] == "::1"
  server.close()


def ask(address, **told):
  """Returns what a host answers to a first line."""
  where = host.address_of(address, "at")
  lines = host.JsonLines(socket.create_connection(where))
  lines.send(**told)
  while True:
    for answer in lines.take(1):
      if answer:
        return answer


def test_whoever_has_no_token_or_no_program_of_this_project_is_refused(
  tmp_path,
):
  program = under_test.scripted(tmp_path, "waits", WAITS)
  good = host.sent(program)
  with under_test.listening() as server:
    for token in ("", "a token of the test", 3):
      answer = ask(server.address, token=token, program=good)
      assert answer["refused"].startswith("unknown token; ")
    for changes, words in (
      ({"module": "http.server"}, "http.server is none of"),
      ({"arguments": [3]}, "it has other arguments than texts"),
      ({"environment": None}, "this is no program"),
      ({"more": 1}, "this is no program"),
    ):
      wrong = good | changes
      answer = ask(server.address, token=under_test.TOKEN, program=wrong)
      assert words in answer["refused"]


def test_a_host_that_refuses_is_named_and_passed_over(tmp_path):
  file = under_test.token_file(tmp_path)
  script = under_test.scripted(tmp_path, "waits", WAITS)
  with (
    under_test.listening(token="a token of another host") as other,
    under_test.listening() as server,
  ):
    setting = addresses.KnownAddresses(
      at=(other.address,), token_file=str(file)
    )
    launcher = setting.open(tmp_path)
    process = launcher.start(script)
    assert under_test.ended(process) == contract.NEVER_RAN
    assert process.reason.startswith(f"{other.address} refuses it: unknown tok")
    launcher.close()
    both = dataclasses.replace(setting, at=(other.address, server.address))
    launcher = both.open(tmp_path)
    process = launcher.start(script)
    under_test.says(script, "here")
    assert process.place == server.address
    launcher.close()


def test_a_program_that_has_failed_goes_to_another_host(tmp_path):
  script = under_test.scripted(tmp_path, "waits", WAITS)
  with under_test.listening() as one, under_test.listening() as other:
    setting = addresses.KnownAddresses(
      at=(one.address, other.address),
      token_file=str(under_test.token_file(tmp_path)),
    )
    launcher = setting.open(tmp_path)
    places = []
    for number in range(1, 4):
      process = launcher.start(script)
      under_test.says(script, "here\n" * number)
      process.kill()
      under_test.ended(process)
      places.append(process.place)
    launcher.close()
    assert places == [one.address, other.address, one.address]


def test_a_host_without_room_for_a_log_says_so(tmp_path, monkeypatch):
  program = host.sent(under_test.scripted(tmp_path, "waits", WAITS))
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
  with under_test.listening() as server:
    answer = ask(server.address, token=under_test.TOKEN, program=program)
  assert answer["full"]
  assert "it has no place for a log: [Errno 2]" in answer["refused"]


def test_a_host_takes_programs_of_its_name_only(tmp_path):
  file = under_test.token_file(tmp_path)
  with (
    under_test.listening(only="learner 1") as one,
    under_test.listening(only="engine") as other,
  ):
    setting = addresses.KnownAddresses(
      at=(one.address, other.address), token_file=str(file), place_s=1
    )
    launcher = setting.open(tmp_path)
    names = ["engine 0", "learner 1", "engine 1", "learner 10", "learner"]
    programs = [under_test.scripted(tmp_path, name, WAITS) for name in names]
    *taken, last_but_one, last = map(launcher.start, programs)
    for program in programs[:3]:
      under_test.says(program, "here")
    for left in (last_but_one, last):
      assert under_test.ended(left) == contract.NEVER_RAN
      assert f"{one.address}: it takes 'learner 1' only" in left.reason
      assert f"{other.address}: it takes 'engine' only" in left.reason
    assert [process.code() for process in taken] == [None] * 3
    launcher.close()


@pytest.mark.parametrize(("only", "takes"), [("run", True), ("engine", False)])
def test_a_host_can_be_for_runs_of_a_sweep(tmp_path, only, takes):
  run = sweep.Run(tmp_path / "run_000", "absent.py", {})
  with under_test.listening(only=only) as server:
    setting = addresses.KnownAddresses(
      at=(server.address,),
      token_file=str(under_test.token_file(tmp_path)),
      place_s=1,
    )
    launcher = setting.open(tmp_path)
    script = under_test.scripted(tmp_path, "waits", WAITS)
    program = dataclasses.replace(script, name=run.program().name)
    process = launcher.start(program)
    if takes:
      under_test.says(program, "here")
    else:
      assert under_test.ended(process) == contract.NEVER_RAN
    launcher.close()


@contextlib.contextmanager
def hanging_up():
  """Yields an address that closes every connection, as a tunnel to nothing."""
  with socketserver.ThreadingTCPServer(
    ("127.0.0.1", 0), socketserver.BaseRequestHandler
  ) as server:
    threading.Thread(target=server.serve_forever, args=(0.05,)).start()
    try:
      yield host.joined("127.0.0.1", server.server_address[1])
    finally:
      server.shutdown()


def test_a_full_host_is_passed_over_and_the_rest_are_told_why(tmp_path):
  file = under_test.token_file(tmp_path)
  with (
    under_test.listening(1) as one,
    under_test.listening(1) as other,
    hanging_up() as tunnel,
  ):
    setting = addresses.KnownAddresses(
      at=("127.0.0.1:1", tunnel, one.address, other.address),
      token_file=str(file),
      place_s=1,
    )
    launcher = setting.open(tmp_path)
    programs = [
      under_test.scripted(tmp_path, f"waits {number}", WAITS)
      for number in range(3)
    ]
    first, second = (launcher.start(program) for program in programs[:2])
    for program in programs[:2]:
      under_test.says(program, "here")
    third = launcher.start(programs[2])
    assert under_test.ended(third) == contract.NEVER_RAN
    assert "no host has taken it in 1 s; " in third.reason
    assert "127.0.0.1:1: [Errno 111] Connection refused" in third.reason
    assert f"{tunnel}: " in third.reason
    assert f"{other.address}: all 1 places are taken" in third.reason
    first.kill()
    under_test.ended(first)
    # Its place is free again, as soon as the host has noticed.
    patient = dataclasses.replace(setting, place_s=60).open(tmp_path)
    fourth = patient.start(programs[0])
    under_test.says(programs[0], "here\nhere")
    assert (second.code(), fourth.code()) == (None, None)
    patient.close()
    launcher.close()


def test_a_host_that_cannot_be_found_is_passed_over(tmp_path):
  file = str(under_test.token_file(tmp_path))
  lost = "lost.invalid:7000"
  setting = addresses.KnownAddresses(at=(lost, "127.0.0.1:1"), token_file=file)
  launcher = setting.open(tmp_path)
  assert launcher.host == "127.0.0.1"
  launcher.close()
  words = f"placement.backend.at names no host that can be found: {lost}: "
  with pytest.raises(ValueError, match=words):
    dataclasses.replace(setting, at=(lost,)).open(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait_for_a_place(tmp_path, number):
  setting = addresses.KnownAddresses(
    at=("127.0.0.1:1",),
    token_file=str(under_test.token_file(tmp_path)),
    place_s=10 * under_test.DEADLINE_S,
  )
  launcher = setting.open(tmp_path)
  process = launcher.start(under_test.scripted(tmp_path, "waits", WAITS))
  process.signal(number)
  assert under_test.ended(process) == contract.NEVER_RAN
  assert process.reason == "it was ended before it had a place"
  launcher.close()


def test_a_host_that_ends_lets_its_programs_save(tmp_path):
  program = under_test.scripted(tmp_path, "waits", f"{WAITS}; sys.exit(7)")
  with under_test.listening() as server:
    setting = addresses.KnownAddresses(
      at=(server.address,), token_file=str(under_test.token_file(tmp_path))
    )
    launcher = setting.open(tmp_path)
    process = launcher.start(program)
    under_test.says(program, "here")
  # By its own end, as its input has closed.
  assert under_test.ended(process) == 7
  launcher.close()


def test_a_host_that_ends_does_not_wait_for_who_says_nothing():
  with under_test.listening() as server:
    silent = socket.create_connection(host.address_of(server.address, "at"))
    while not any("request" in x.name for x in threading.enumerate()):
      time.sleep(0.01)
    begin_s = time.monotonic()
  assert time.monotonic() - begin_s < host.SILENCE_S / 2
  silent.close()
