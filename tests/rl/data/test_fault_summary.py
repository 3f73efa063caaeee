"""The most frequent fault, of members made by hand."""

from rl.data import fault_summary, trajectory

STATUS = trajectory.Status
NAN = (STATUS.REWARD_FAULT, "Outcome returned nan")
LATE = (STATUS.ENV_FAULT, "step took over 10 s")
OK = (STATUS.COMPLETED, "")


def _members(*ends):
  return [
    trajectory.Trajectory("game/train/0", 0, i, [], status, fault=fault)
    for i, (status, fault) in enumerate(ends)
  ]


def test_the_most_frequent_fault_has_its_most_frequent_message():
  other = (STATUS.REWARD_FAULT, "reward raised KeyError('x')")
  found = fault_summary.most_frequent(_members(NAN, LATE, OK, other, NAN))
  assert found == ("reward_fault", 3, "Outcome returned nan")
  assert str(found) == "reward_fault: Outcome returned nan"


def test_what_was_cut_off_is_no_fault():
  cut = [(STATUS.STALE, "too old"), (STATUS.REDUNDANT, "")]
  assert fault_summary.most_frequent(_members(OK, *cut)) is None
  assert fault_summary.most_frequent([]) is None


def test_a_message_is_one_short_line_of_ascii():
  long = (
    STATUS.ENV_FAULT,
    "step raised\n  E\u00df: " + "x" * 500 + " (a.py:7)",
  )
  found = fault_summary.most_frequent(_members(long))
  assert found is not None
  assert found.message.startswith(r"step raised E\xdf: xx")
  assert len(found.message) == 160
  assert found.message.endswith("xx (a.py:7)")
  assert "xx...xx" in found.message
