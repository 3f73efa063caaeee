"""What must hold of each attempt at a group, when it is over.

Each invariant is a pure function: an attempt, its schedule and the group size
-> a sentence for every way in which it is broken. `RULES` says which schedule
each one binds.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from rl.audit import lifecycle
from rl.schedule import overlap

Check = Callable[[lifecycle.Attempt, overlap.Overlap, int], Iterator[str]]


class Rule(NamedTuple):
  """An invariant and the schedules that it binds."""

  binds: Callable[[overlap.Overlap], bool]
  broken: Check


def whole(
  attempt: lifecycle.Attempt, schedule: overlap.Overlap, group_size: int
) -> Iterator[str]:
  """G different members, all graded when it was ready, form the group."""
  del schedule
  if not attempt.trained:
    return
  members = sorted(attempt.trained["members"])
  if len(set(members)) != group_size or len(members) != group_size:
    yield f"{attempt}: trained with members {members}, not {group_size} of them"
  missing = sorted(set(members) - attempt.graded)
  if missing and not attempt.restored:
    yield f"{attempt}: members {missing} were not graded when it was ready"


def launched(
  attempt: lifecycle.Attempt, schedule: overlap.Overlap, group_size: int
) -> Iterator[str]:
  """G and the redundant members are played, and all of them come to an end."""
  wanted = group_size + schedule.redundancy.extra_members
  beyond = [i for i in attempt.members if not 0 <= i < wanted]
  if beyond:
    yield f"{attempt}: members {beyond} beyond the {wanted} that are played"
  if attempt.overdue and attempt.open:
    yield f"{attempt}: members {attempt.open} never ended"
  elif attempt.overdue:
    yield f"{attempt}: {len(attempt.members)} of {wanted} members were played"


def balanced(
  attempt: lifecycle.Attempt, schedule: overlap.Overlap, group_size: int
) -> Iterator[str]:
  """What was sampled is trained, masked or dropped, to the token."""
  del schedule, group_size
  if attempt.trained:
    trained = attempt.trained["tokens"]
    booked = trained + attempt.trained["masked"]
    used = attempt.sampled_by(attempt.used)
    if booked != attempt.chosen:
      yield (
        f"{attempt}: {attempt.chosen} tokens were sampled, but {booked} are "
        "trained or masked"
      )
    elif "used" in attempt.trained and not attempt.restored and trained != used:
      yield (
        f"{attempt}: {trained} tokens are trained, but members {attempt.used} "
        f"sampled {used}"
      )
  elif attempt.dropped and not attempt.open:
    booked = attempt.dropped["tokens"]
    if booked != attempt.sampled:
      yield (
        f"{attempt}: {attempt.sampled} tokens were sampled, but {booked} "
        "dropped"
      )


def counted(
  attempt: lifecycle.Attempt, schedule: overlap.Overlap, group_size: int
) -> Iterator[str]:
  """A member's turns and versions hold all tokens that its end tells.

  An answer that was cut off is a turn too, and one of no tokens is one.
  """
  del schedule, group_size
  for i, member in attempt.members.items():
    tokens = sum(count for _, count in member.versions)
    if tokens != member.tokens:
      yield (
        f"{attempt} member {i}: {tokens} tokens have a version, of "
        f"{member.tokens}"
      )
    if not member.over:
      continue
    if member.turn_tokens != member.tokens:
      yield (
        f"{attempt} member {i}: turns of {member.turn_tokens} tokens, of "
        f"{member.tokens}"
      )
    if member.num_turns != member.turns:
      yield (
        f"{attempt} member {i}: {member.num_turns} turns were told, of "
        f"{member.turns}"
      )


def ends_in_time(
  attempt: lifecycle.Attempt, schedule: overlap.Overlap, group_size: int
) -> Iterator[str]:
  """No attempt is lost: it is trained or dropped in time.

  In the order of submission, and in any with a bound of 0, what is admitted at
  version v is of round v + eta at the latest, or redundant then. None is open
  any more at version v + eta + 2: a redundant group has one round to end.

  In the order of completion with a bound above 0, with redundant groups or
  without, others may overtake an attempt as long as it has no token. From its
  first on, of version F, the bound holds: it is too old after round F + eta,
  and over before version F + eta + 2. While no member has an engine, and when
  none plays any more, there is nothing to wait for but as many publishes.
  """
  del group_size
  since = _bound_since(attempt) if schedule.checks_age else attempt.begun_at
  if since is None:
    return
  if attempt.open_at >= since + schedule.max_staleness + 2:
    yield (
      f"{attempt}: neither trained nor dropped by version {attempt.open_at}, "
      f"though under way since version {since}"
    )


def _bound_since(attempt: lifecycle.Attempt) -> int | None:
  """Returns the version from which on no other may overtake an attempt."""
  if attempt.restored:
    return attempt.restored["first_version"]
  members = attempt.members.values()
  firsts = [m.first_version for m in members if m.first_version is not None]
  if firsts:
    return min(firsts)
  if not members:
    return attempt.begun_at
  played = len(members) >= attempt.launched and not attempt.open
  return attempt.ended_at if played else None


def versions_rise(
  attempt: lifecycle.Attempt, schedule: overlap.Overlap, group_size: int
) -> Iterator[str]:
  """Versions never fall along a sequence."""
  del schedule, group_size
  for i, member in attempt.members.items():
    versions = [version for version, _ in member.versions]
    if any(a > b for a, b in itertools.pairwise(versions)):
      yield f"{attempt} member {i}: versions fall: {versions}"


def first_version(
  attempt: lifecycle.Attempt, schedule: overlap.Overlap, group_size: int
) -> Iterator[str]:
  """F is the oldest first token of the members that make up the group."""
  del schedule, group_size
  for i, member in attempt.members.items():
    told, found = member.first_version, _first(member)
    if told is not None and found is not None and told != found:
      yield (
        f"{attempt} member {i}: its first token was of version {told}, its "
        f"sequence begins with {found}"
      )
  if not attempt.trained:
    return
  chosen = attempt.trained["members"]
  firsts = [_first(attempt.members[i]) for i in chosen if i in attempt.members]
  oldest = min([f for f in firsts if f is not None], default=None)
  for event in (attempt.ready, attempt.trained):
    if event and oldest is not None and event["first_version"] != oldest:
      yield (
        f"{attempt}: {event['kind']} as if begun at {event['first_version']}, "
        f"but its first token is of version {oldest}"
      )


def _first(member: lifecycle.Member) -> int | None:
  return member.versions[0][0] if member.versions else None


def bounded(
  attempt: lifecycle.Attempt, schedule: overlap.Overlap, group_size: int
) -> Iterator[str]:
  """T - F is at most eta, and never below 0."""
  del group_size
  if not attempt.trained:
    return
  trained, began = attempt.trained["version"], attempt.trained["first_version"]
  if not 0 <= trained - began <= schedule.max_staleness:
    yield (
      f"{attempt}: trained at version {trained} but began at {began}; the "
      f"bound is {schedule.max_staleness}"
    )


def taken_in_its_round(
  attempt: lifecycle.Attempt, schedule: overlap.Overlap, group_size: int
) -> Iterator[str]:
  """A group is trained in the round that took it."""
  del schedule, group_size
  if not (attempt.trained and attempt.dequeued):
    return
  taken, trained = attempt.dequeued["version"], attempt.trained["version"]
  if taken != trained:
    yield f"{attempt}: taken in round {taken} but trained in round {trained}"


def one_version(
  attempt: lifecycle.Attempt, schedule: overlap.Overlap, group_size: int
) -> Iterator[str]:
  """A sequence has one version: weights change only between sequences."""
  del schedule, group_size
  for i, member in attempt.members.items():
    versions = sorted({version for version, _ in member.versions})
    if len(versions) > 1:
      yield f"{attempt} member {i}: sampled by versions {versions}"


def on_policy(
  attempt: lifecycle.Attempt, schedule: overlap.Overlap, group_size: int
) -> Iterator[str]:
  """With a bound of 0 every token of round k has version k."""
  del schedule, group_size
  if not attempt.trained:
    return
  round_ = attempt.trained["version"]
  for i in attempt.trained["members"]:
    runs = attempt.members[i].versions if i in attempt.members else ()
    others = sorted({version for version, _ in runs} - {round_})
    if others:
      yield f"{attempt} member {i} of round {round_}: tokens of {others}"


def one_step_off(
  attempt: lifecycle.Attempt, schedule: overlap.Overlap, group_size: int
) -> Iterator[str]:
  """The lag is exactly 1; in the first round, which nothing precedes, 0.

  What is played again, in a later attempt or after a restart, may be younger.
  """
  del schedule, group_size
  if not attempt.trained or attempt.number or attempt.replayed:
    return
  trained = attempt.trained["version"]
  lag = trained - attempt.trained["first_version"]
  if lag != min(trained, 1):
    yield f"{attempt}: trained in round {trained} with a lag of {lag}"


def _always(schedule: overlap.Overlap) -> bool:
  del schedule
  return True


def _is_one_step_off(schedule: overlap.Overlap) -> bool:
  """A hard frontier holds groups back; they may begin a version later."""
  return (
    schedule.drains
    and schedule.max_staleness == 1
    and schedule.consume == "submit"
    and schedule.admission != "hard_frontier"
  )


RULES = (
  Rule(_always, whole),
  Rule(_always, launched),
  Rule(_always, balanced),
  Rule(_always, counted),
  Rule(_always, ends_in_time),
  Rule(_always, versions_rise),
  Rule(_always, first_version),
  Rule(_always, bounded),
  Rule(_always, taken_in_its_round),
  Rule(lambda schedule: schedule.on_publish == "drain", one_version),
  Rule(lambda schedule: schedule.max_staleness == 0, on_policy),
  Rule(_is_one_step_off, one_step_off),
)
