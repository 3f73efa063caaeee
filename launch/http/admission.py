"""Decides how many requests are in progress, in all and of each client."""

import collections
import contextlib
from collections.abc import Iterator


class Busy(RuntimeError):
  """As many requests are in progress as may be."""


class Draining(RuntimeError):
  """The server ends, and takes no more requests."""


class Admission:
  """Counts answers in progress; all methods belong to one event loop.

  Args:
    max_answers: of all clients together; None: any number.
    max_of_client: of one client; None: any number.

  Attributes:
    running: answers in progress.
    draining: no more are let in.
  """

  def __init__(
    self, max_answers: int | None = None, max_of_client: int | None = None
  ):
    self.running = 0
    self.draining = False
    self._max = max_answers
    self._max_of_client = max_of_client
    self._of_client: collections.Counter[str] = collections.Counter()

  @contextlib.contextmanager
  def answering(self, client: str, count: int = 1) -> Iterator[None]:
    """Holds room for answers to a client in the body of a `with`.

    Raises:
      Busy: there is not as much room.
    """
    for most, running, whose in (
      (self._max_of_client, self._of_client[client], "this client"),
      (self._max, self.running, "all clients"),
    ):
      if most is not None and running + count > most:
        raise Busy(
          f"{running} answers to {whose} are in progress, and {most} is the "
          f"most: {count} more must wait"
        )
    self.running += count
    self._of_client[client] += count
    try:
      yield
    finally:
      self.running -= count
      self._of_client[client] -= count
      if not self._of_client[client]:
        del self._of_client[client]
