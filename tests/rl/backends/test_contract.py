"""The protocol of a backend, of which all are held to the same."""

import re
import signal

import pytest

from rl.backends import contract, local
from tests.helpers import backends_under_test as under_test

pytestmark = pytest.mark.process

WAITS = """
import os, signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(7))
print("pid", os.getpid(), flush=True)
# As all programs of the project do: it ends with its standard input.
sys.stdin.read()
"""


@pytest.fixture(scope="module", params=under_test.EACH)
def backend(request, tmp_path_factory):
  folder = tmp_path_factory.mktemp("backend")
  with under_test.up(request.param, folder) as made:
    made.validate()
    made.validate_installed()
    yield made


@pytest.fixture
def launcher(backend, tmp_path):
  made = backend.open(tmp_path / "files")
  yield made
  made.close()


def pid_of(program) -> int:
  found = re.search(r"pid (\d+)\n", under_test.says(program, "pid "))
  assert found is not None
  return int(found[1])


def test_it_has_all_that_the_protocol_names(backend):
  assert isinstance(backend, contract.Backend)


def test_a_program_is_told_its_line_and_its_output_and_code_come_back(
  launcher, tmp_path
):
  body = """
import os, sys
print("heard", sys.stdin.readline().strip(), os.environ["OF_ITS_OWN"])
print("given", *sys.argv[3:], flush=True)
print("an error", file=sys.stderr)
sys.exit(3)
"""
  program = under_test.scripted(
    tmp_path,
    "speaks",
    body,
    "--x=1 2",
    told="a secret",
    environment={"OF_ITS_OWN": "yes"},
  )
  process = launcher.start(program)
  assert under_test.ended(process) == 3
  text = under_test.says(program, "an error")
  assert "heard a secret yes\n" in text
  assert "given --x=1 2\n" in text
  assert not process.reason


def test_it_has_a_place_and_a_signal_reaches_it(launcher, tmp_path):
  program = under_test.scripted(tmp_path, "waits", WAITS)
  process = launcher.start(program)
  pid_of(program)
  assert process.code() is None
  process.signal(signal.SIGINT)
  assert under_test.ended(process) == 7
  assert bool(process.place) == (not isinstance(process, local.LocalProcess))
  process.signal(signal.SIGINT)  # It has ended, and that is no error.


def test_a_kill_ends_one_and_no_other(launcher, tmp_path):
  programs = [
    under_test.scripted(tmp_path, f"waits {number}", WAITS)
    for number in range(2)
  ]
  one, other = (launcher.start(program) for program in programs)
  pids = [pid_of(program) for program in programs]
  one.kill()
  assert under_test.ended(one) != 0
  assert under_test.is_gone(pids[0])
  assert other.code() is None
  other.signal(signal.SIGINT)
  assert under_test.ended(other) == 7


def test_the_end_of_a_launcher_leaves_nothing(backend, tmp_path):
  launcher = backend.open(tmp_path / "files")
  programs = [
    under_test.scripted(tmp_path, f"waits {number}", WAITS)
    for number in range(2)
  ]
  processes = [launcher.start(program) for program in programs]
  pids = [pid_of(program) for program in programs]
  launcher.close()
  assert all(map(under_test.is_gone, pids))
  assert all(process.code() is not None for process in processes)
  launcher.close()


def test_a_program_that_cannot_be_started_says_why(launcher, tmp_path):
  program = under_test.scripted(tmp_path, "absent", "")
  (tmp_path / "absent.py").unlink()
  process = launcher.start(program)
  assert under_test.ended(process) != 0
  said = process.reason + program.log.read_text()
  assert "it cannot be started" in said
  assert "absent.py" in said


def test_nothing_is_left_when_the_one_who_started_it_is_killed(
  backend, tmp_path
):
  program = under_test.scripted(tmp_path, "waits", WAITS)
  with under_test.starter(backend, program, tmp_path / "files") as process:
    pid = pid_of(program)
    process.kill()
  assert under_test.is_gone(pid)
