"""Promises about one attempt at a group, checked when the attempt is over."""

import collections
import itertools
from collections.abc import Iterator

from rl.audit import event_log, invariant, lifecycle
from rl.schedule import overlap

_Attempt = lifecycle.AttemptRecord
_Member = lifecycle.MemberRecord
_Event = event_log.Event
_Violations = Iterator[str]


class AttemptInvariant(invariant.Invariant):
  """A promise about single attempts: it keeps no state between them.

  A subclass yields the violations of a member, of an attempt or of a trained
  attempt.
  """

  def _on_attempt_over(self, attempt: _Attempt) -> None:
    for i, member in attempt.members.items():
      for violation in self._of_member(member):
        self.report(f"{attempt} member {i}: {violation}")
    for violation in self._of_attempt(attempt):
      self.report(f"{attempt}: {violation}")

  def _of_member(self, member: _Member) -> _Violations:
    del member
    yield from ()

  def _of_attempt(self, attempt: _Attempt) -> _Violations:
    if attempt.trained:
      yield from self._of_trained(attempt, attempt.trained)

  def _of_trained(self, attempt: _Attempt, trained: _Event) -> _Violations:
    del attempt, trained
    yield from ()


class WholeGroups(AttemptInvariant):
  """G different members, all graded when it was ready, form the group."""

  def _of_trained(self, attempt: _Attempt, trained: _Event) -> _Violations:
    size, members = self.group_size, sorted(trained["members"])
    if len(set(members)) != size or len(members) != size:
      yield f"trained with members {members}, not {size} of them"
    missing = sorted(set(members) - attempt.graded)
    if missing and not attempt.restored:
      yield f"members {missing} were not graded when it was ready"


class FaultsMasked(AttemptInvariant):
  """A member with a fault is never trained, and neither is an aborted one."""

  def _of_trained(self, attempt: _Attempt, trained: _Event) -> _Violations:
    for i in attempt.used:
      member = attempt.members.get(i)
      if member is not None and member.fault:
        yield f"member {i} is trained, although it {member.fault}"


class AllLaunched(AttemptInvariant):
  """G and the redundant members are played, and all of them come to an end."""

  def _of_attempt(self, attempt: _Attempt) -> _Violations:
    launched = self.group_size + self.schedule.redundancy.extra_members
    beyond = [i for i in attempt.members if not 0 <= i < launched]
    if beyond:
      yield f"members {beyond} beyond the {launched} that are played"
    if attempt.overdue and attempt.open:
      yield f"members {attempt.open} never ended"
    elif attempt.overdue:
      yield f"{len(attempt.members)} of {launched} members were played"


class TokensBalance(AttemptInvariant):
  """All sampled tokens are trained, masked or dropped, to the token."""

  def _of_attempt(self, attempt: _Attempt) -> _Violations:
    yield from super()._of_attempt(attempt)
    if attempt.dropped and not attempt.trained and not attempt.open:
      dropped, sampled = attempt.dropped["tokens"], attempt.sampled
      if dropped != sampled:
        yield f"{sampled} tokens were sampled, but {dropped} dropped"

  def _of_trained(self, attempt: _Attempt, trained: _Event) -> _Violations:
    tokens, sampled = trained["tokens"], attempt.sampled_by(attempt.used)
    accounted = tokens + trained["masked"]
    if accounted != attempt.chosen:
      counts = f"{attempt.chosen} tokens were sampled, but {accounted}"
      yield f"{counts} are trained or masked"
    elif "used" in trained and not attempt.restored and tokens != sampled:
      counts = f"{tokens} tokens are trained, but members {attempt.used}"
      yield f"{counts} sampled {sampled}"


class TokensCounted(AttemptInvariant):
  """A member's turns and versions hold all tokens of its end event.

  An answer that was cut off is a turn too, and so is one of no tokens.
  """

  def _of_member(self, member: _Member) -> _Violations:
    tokens = sum(count for _, count in member.versions)
    if tokens != member.tokens:
      yield f"{tokens} tokens have a version, of {member.tokens}"
    if member.over and member.turn_tokens != member.tokens:
      yield f"turns of {member.turn_tokens} tokens, of {member.tokens}"
    if member.over and member.num_turns != member.turns:
      yield f"{member.num_turns} turns were logged, of {member.turns}"


class EndsInTime(AttemptInvariant):
  """No attempt is lost: it is trained or dropped in time.

  In the order of submission, and in any order with a bound of 0, an attempt
  admitted at version v is trained in round v + eta at the latest, or redundant
  then. None is open at version v + eta + 2: a redundant group has one round to
  end.

  In the order of completion with a bound above 0, with redundant groups or
  without, others may overtake an attempt as long as it has no token. From its
  first on, of version F, the bound holds: it is too old after round F + eta,
  and over before version F + eta + 2. An attempt whose members have all ended
  without a token is given as many publishes, one without an engine any number.
  """

  def _of_attempt(self, attempt: _Attempt) -> _Violations:
    schedule, last = self.schedule, attempt.open_at
    since = _bound_since(attempt) if schedule.checks_age else attempt.begun_at
    if since is not None and last >= since + schedule.max_staleness + 2:
      yield (
        f"neither trained nor dropped by version {last}, though under way "
        f"since version {since}"
      )


def _bound_since(attempt: _Attempt) -> int | None:
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


class VersionsRise(AttemptInvariant):
  """Versions never fall along a sequence."""

  def _of_member(self, member: _Member) -> _Violations:
    versions = [version for version, _ in member.versions]
    if any(a > b for a, b in itertools.pairwise(versions)):
      yield f"versions fall: {versions}"


class FirstVersion(AttemptInvariant):
  """F is the oldest first token of the members that make up the group."""

  def _of_member(self, member: _Member) -> _Violations:
    logged, sampled = member.first_version, _first(member)
    if logged is not None and sampled is not None and logged != sampled:
      token = f"its first token was of version {logged}"
      yield f"{token}, its sequence begins with {sampled}"

  def _of_trained(self, attempt: _Attempt, trained: _Event) -> _Violations:
    saved = attempt.restored
    if saved and saved["first_version"] != trained["first_version"]:
      begun = f"trained as if begun at {trained['first_version']}"
      yield f"{begun}, but restored as of {saved['first_version']}"
    known = [i for i in trained["members"] if i in attempt.members]
    firsts = [_first(attempt.members[i]) for i in known]
    oldest = min([f for f in firsts if f is not None], default=None)
    for event in (attempt.ready, trained):
      if event and oldest is not None and event["first_version"] != oldest:
        begun = f"{event['kind']} as if begun at {event['first_version']}"
        yield f"{begun}, but its first token is of version {oldest}"


def _first(member: _Member) -> int | None:
  return member.versions[0][0] if member.versions else None


class BoundedStaleness(AttemptInvariant):
  """T - F is at most eta, and never below 0."""

  def _of_trained(self, attempt: _Attempt, trained: _Event) -> _Violations:
    at, began = trained["version"], trained["first_version"]
    bound = self.schedule.max_staleness
    if not 0 <= at - began <= bound:
      lag = f"trained at version {at} but began at {began}"
      yield f"{lag}; the bound is {bound}"


class TrainedInItsRound(AttemptInvariant):
  """A group is trained in the round that took it."""

  def _of_trained(self, attempt: _Attempt, trained: _Event) -> _Violations:
    taken = (attempt.dequeued or trained)["version"]
    if taken != trained["version"]:
      yield f"taken in round {taken} but trained in round {trained['version']}"


class OneVersion(AttemptInvariant):
  """A sequence has one version: weights change only between sequences."""

  @staticmethod
  def binds(schedule: overlap.Overlap) -> bool:
    """Those that drain engines before weights change."""
    return schedule.on_publish == "drain"

  def _of_member(self, member: _Member) -> _Violations:
    versions = sorted({version for version, _ in member.versions})
    if len(versions) > 1:
      yield f"sampled by versions {versions}"


class OnPolicy(AttemptInvariant):
  """With a bound of 0 every token of round k has version k."""

  @staticmethod
  def binds(schedule: overlap.Overlap) -> bool:
    """Those with a bound of 0."""
    return schedule.max_staleness == 0

  def _of_trained(self, attempt: _Attempt, trained: _Event) -> _Violations:
    round_ = trained["version"]
    for i in trained["members"]:
      runs = attempt.members[i].versions if i in attempt.members else ()
      others = sorted({version for version, _ in runs} - {round_})
      if others:
        yield f"member {i} has tokens of {others} in round {round_}"


class OneStepOff(AttemptInvariant):
  """The lag is exactly 1; in the first round, which nothing precedes, 0.

  An attempt that is played again, after a drop or a restart, may be younger,
  and so may one that waited over a publish for engines that were lost.
  """

  def __init__(self, context: invariant.Context):
    super().__init__(context)
    self._lost: set[int] = set()
    # Versions published while an engine was lost, the newest ones: an attempt
    # is over a few publishes after it was trained, at the latest.
    self._missed: collections.deque[int] = collections.deque(maxlen=8)
    self._newest = 0

  def _on_engine_lost(self, event: _Event) -> None:
    self._lost.add(event["engine"])

  def _on_engine_back(self, event: _Event) -> None:
    self._lost.discard(event["engine"])
    # Within a publish, it serves what others still wait for.
    if event["version"] > self._newest:
      self._missed.append(event["version"])

  _on_engine_joined = _on_engine_back

  def _on_engine_left(self, event: _Event) -> None:
    self._lost.discard(event["engine"])

  _on_engine_given_up = _on_engine_left  # Nothing waits for it.

  def _on_published(self, event: _Event) -> None:
    self._newest = event["version"]
    if self._lost:
      self._missed.append(event["version"])

  @staticmethod
  def binds(schedule: overlap.Overlap) -> bool:
    """Strict pipelines; groups behind a hard frontier may begin later."""
    return (
      schedule.drains
      and schedule.max_staleness == 1
      and schedule.consume == "submit"
      and schedule.admission != "hard_frontier"
    )

  def _of_trained(self, attempt: _Attempt, trained: _Event) -> _Violations:
    at, first = trained["version"], trained["first_version"]
    if attempt.number or attempt.replayed:
      return
    waited = any(attempt.begun_at < v <= first for v in self._missed)
    if (lag := at - first) != min(at, 1) and not waited:
      yield f"trained in round {at} with a lag of {lag}"


INVARIANTS = (
  WholeGroups,
  FaultsMasked,
  AllLaunched,
  TokensBalance,
  TokensCounted,
  EndsInTime,
  VersionsRise,
  FirstVersion,
  BoundedStaleness,
  TrainedInItsRound,
  OneVersion,
  OnPolicy,
  OneStepOff,
)
