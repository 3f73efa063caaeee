"""The protocol of an invariant that watches a whole run."""

from rl.schedule import overlap


class Invariant:
  """Built with the schedule; its first line says what it promises.

  A method that has the name of a kind of event is given each such event, and
  one named `every` all of them: `(event) -> Iterator[str]`, a sentence for
  every way in which the event breaks it.
  """

  def __init__(self, schedule: overlap.Overlap):
    del schedule

  @staticmethod
  def binds(schedule: overlap.Overlap) -> bool:
    """Whether a schedule promises it; most do."""
    del schedule
    return True
