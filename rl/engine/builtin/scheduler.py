"""Which of the running requests fly next. Pure: no clock, no task, no device.

running --(not in flight)--> ready --+--> choose --> pages --> Choice
   flight before --(goes on)---------+
"""

from collections.abc import Sequence

from rl.engine.builtin import dispatch_plan, request_queue
from rl.engine.builtin import settings as engine_settings

_FIXED_ROWS = {"cpu": 8, "gpu": 512, "tpu": 512}
"""Rows that cost as much as a step costs anyway. Measured on a CPU; on others
about the ratio of arithmetic to memory bandwidth."""


class Schedule:
  """Decides on one flight after the other; the engine calls it in turn.

  Args:
    batch: whose requests fly.
    longest: conversation of the model.
    parts: of the mesh over which rows are split.
    platform: of the mesh.
  """

  def __init__(
    self,
    batch: request_queue.Batch,
    settings: engine_settings.EngineSettings,
    *,
    longest: int,
    parts: int,
    platform: str,
  ):
    self._batch = batch
    self._settings = settings
    self._longest = longest
    self._parts = parts
    self._fixed = _FIXED_ROWS.get(platform, max(_FIXED_ROWS.values()))
    self._turn = 0
    self._survival = 1.0

  def landed(self, flight: dispatch_plan.Flight, survivors: int) -> None:
    """Learns how many rows of a flight have not ended."""
    if flight.could_go_on:
      share = min(1.0, survivors / flight.could_go_on)
      self._survival += 0.1 * (share - self._survival)

  def next(
    self, last: dispatch_plan.Flight | None
  ) -> dispatch_plan.Choice | None:
    """Returns what flies next, with pages for all that it may do.

    None: nothing is ready, or it is better to wait for the flight before.

    Args:
      last: the flight before, if it has not landed.

    Raises:
      RuntimeError: one request alone does not get the pages that it needs.
    """
    ready = self._candidates(last)
    if not ready:
      return None
    self._turn += 1
    choice = self._with_pages(ready)
    if not choice.rows and last is not None:
      return None
    if not choice.rows:
      # Nothing else is under way: the first can take the pages of all others.
      choice = self._with_pages(ready[:1])
      lease = ready[0].lease
      if not choice.rows and lease and lease.spare:
        # It beginning again, none is held twice.
        self._batch.preempt(ready[0])
        self._batch.admit(again_only=True)
        ready = self._candidates(None)
        if not ready:  # It was cancelled just now.
          return None
        choice = self._with_pages(ready[:1])
    if not choice.rows:
      paging = self._batch.paging
      raise RuntimeError(
        f"request {ready[0].request.request_id} gets no pages: of "
        f"{paging.num_pages}, {paging.num_free} are free"
      )
    for one in choice.rows:
      one.turn = self._turn
    return choice

  def _candidates(
    self, last: dispatch_plan.Flight | None
  ) -> list[dispatch_plan.Running]:
    """Returns the requests that may fly now, in order; none to wait.

    While a flight is on its way, the next is worth planning when others fill
    it, or when most of the same will go on.
    """
    running = self._batch.running
    ready = sorted(
      (one for one in running if not one.flights), key=dispatch_plan.by_order
    )
    if last is None:
      return ready
    if ready:
      alone, together = (
        self._settings.efficiency(len(rows), self._fixed)
        for rows in (ready, running)
      )
      if 4 * alone >= 3 * together:
        return ready
    going_on = [one for one in last.rows if one.lease and one.left > 0]
    if 4 * len(going_on) * self._survival < 3 * len(last.rows):
      return []
    return sorted([*going_on, *ready], key=dispatch_plan.by_order)

  def _with_pages(
    self, ready: Sequence[dispatch_plan.Running]
  ) -> dispatch_plan.Choice:
    choice = dispatch_plan.choose(
      ready,
      self._settings,
      longest=self._longest,
      parts=self._parts,
      fixed=self._fixed,
      turn=self._turn,
    )
    rows: list[dispatch_plan.Running] = []
    for one in choice.rows:
      # Not if another of these has just taken its pages.
      if one.lease and self._batch.make_room(one, choice.need(one), rows):
        rows.append(one)
    return choice._replace(rows=rows)
