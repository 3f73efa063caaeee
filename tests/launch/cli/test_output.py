"""Output that nobody reads, of work that goes on."""

import contextlib
import functools
import os
import sys

import pytest

from launch.cli import output


@contextlib.contextmanager
def without_a_reader():
  read, write = os.pipe()
  os.close(read)
  with os.fdopen(write, "w") as stream:
    yield stream


@pytest.mark.parametrize(
  ("opened", "reason"),
  [
    (without_a_reader, "Broken pipe"),
    (functools.partial(open, "/dev/full", "w"), "No space left on device"),
  ],
  ids=["a pipe", "a disk"],
)
@pytest.mark.parametrize("size", [1, 1 << 20], ids=["a line", "much"])
def test_what_stdout_does_not_take_is_dropped_and_told_once(
  opened, reason, size, monkeypatch, capsys
):
  with opened() as stream:
    monkeypatch.setattr(sys, "stdout", stream)
    with output.dropping():
      for _ in range(2):
        print("x" * size, flush=True)
    # Also behind it, as the interpreter flushes at its end.
    print("done", flush=True)
  told = capsys.readouterr().err
  assert told.count("\n") == 1
  assert told.endswith(f" warning: stdout takes no more: {reason}\n")


def test_stderr_may_be_gone_as_well(monkeypatch, capsys):
  with without_a_reader() as stream:
    monkeypatch.setattr(sys, "stderr", stream)
    with output.dropping():
      print("an error", file=sys.stderr, flush=True)
      print("a result")
  assert capsys.readouterr().out == "a result\n"
