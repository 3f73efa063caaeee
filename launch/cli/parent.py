"""The end of a program along with the one that has started it.

A pipe closes with its process, also when that is killed.
"""

import os
import sys
import threading
from collections.abc import Callable


def watch(end: Callable[[], object]) -> None:
  """Calls a function in a thread once the standard input has closed.

  One that was never open has closed: `flags.command` opens it on nothing.
  """

  def read() -> None:
    # Not by sys.stdin, whose lock would fail the interpreter's own end.
    while os.read(number, 1 << 10):
      pass
    end()

  number = sys.stdin.fileno()
  threading.Thread(target=read, daemon=True).start()
