"""Promises about one attempt at a group, checked when the attempt is over."""

import itertools

from rl.audit import invariant, lifecycle
from rl.schedule import overlap


class AttemptInvariant(invariant.Invariant):
  """A promise about single attempts: `check` keeps no state between them."""

  def __init__(self, context: invariant.Context):
    super().__init__(context)
    self.handles = {invariant.ATTEMPT_OVER: self.check}

  def check(self, attempt: lifecycle.AttemptRecord) -> None:
    """Reports the violations of one attempt."""
    raise NotImplementedError


class WholeGroups(AttemptInvariant):
  """G different members, all graded when it was ready, form the group."""

  def check(self, attempt: lifecycle.AttemptRecord) -> None:
    """Looks at the members of a trained group."""
    if not attempt.trained:
      return
    size, members = self.group_size, sorted(attempt.trained["members"])
    if len(set(members)) != size or len(members) != size:
      self.report(
        f"{attempt}: trained with members {members}, not {size} of them"
      )
    missing = sorted(set(members) - attempt.graded)
    if missing and not attempt.restored:
      self.report(
        f"{attempt}: members {missing} were not graded when it was ready"
      )


class AllLaunched(AttemptInvariant):
  """G and the redundant members are played, and all of them come to an end."""

  def check(self, attempt: lifecycle.AttemptRecord) -> None:
    """Counts the members, and those that never ended."""
    launched = self.group_size + self.schedule.redundancy.extra_members
    beyond = [i for i in attempt.members if not 0 <= i < launched]
    if beyond:
      self.report(
        f"{attempt}: members {beyond} beyond the {launched} that are played"
      )
    if attempt.overdue and attempt.open:
      self.report(f"{attempt}: members {attempt.open} never ended")
    elif attempt.overdue:
      self.report(
        f"{attempt}: {len(attempt.members)} of {launched} members were played"
      )


class TokensBalance(AttemptInvariant):
  """All sampled tokens are trained, masked or dropped, to the token."""

  def check(self, attempt: lifecycle.AttemptRecord) -> None:
    """Compares both sides of a trained or dropped attempt."""
    if attempt.trained:
      self._check_trained(attempt, attempt.trained["tokens"])
    elif attempt.dropped and not attempt.open:
      dropped = attempt.dropped["tokens"]
      if dropped != attempt.sampled:
        self.report(
          f"{attempt}: {attempt.sampled} tokens were sampled, but {dropped} "
          "dropped"
        )

  def _check_trained(
    self, attempt: lifecycle.AttemptRecord, trained: int
  ) -> None:
    assert attempt.trained
    accounted = trained + attempt.trained["masked"]
    used = attempt.sampled_by(attempt.used)
    if accounted != attempt.chosen:
      self.report(
        f"{attempt}: {attempt.chosen} tokens were sampled, but {accounted} are "
        "trained or masked"
      )
    elif "used" in attempt.trained and not attempt.restored and trained != used:
      self.report(
        f"{attempt}: {trained} tokens are trained, but members {attempt.used} "
        f"sampled {used}"
      )


class TokensCounted(AttemptInvariant):
  """A member's turns and versions hold all tokens of its end event.

  An answer that was cut off is a turn too, and so is one of no tokens.
  """

  def check(self, attempt: lifecycle.AttemptRecord) -> None:
    """Adds up the turns and versions of each member."""
    for i, member in attempt.members.items():
      tokens = sum(count for _, count in member.versions)
      if tokens != member.tokens:
        self.report(
          f"{attempt} member {i}: {tokens} tokens have a version, of "
          f"{member.tokens}"
        )
      if not member.over:
        continue
      if member.turn_tokens != member.tokens:
        self.report(
          f"{attempt} member {i}: turns of {member.turn_tokens} tokens, of "
          f"{member.tokens}"
        )
      if member.num_turns != member.turns:
        self.report(
          f"{attempt} member {i}: {member.num_turns} turns were logged, of "
          f"{member.turns}"
        )


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

  def check(self, attempt: lifecycle.AttemptRecord) -> None:
    """Compares the last version it was open at with the bound."""
    schedule = self.schedule
    since = _bound_since(attempt) if schedule.checks_age else attempt.begun_at
    if since is None:
      return
    if attempt.open_at >= since + schedule.max_staleness + 2:
      self.report(
        f"{attempt}: neither trained nor dropped by version {attempt.open_at}, "
        f"though under way since version {since}"
      )


def _bound_since(attempt: lifecycle.AttemptRecord) -> int | None:
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

  def check(self, attempt: lifecycle.AttemptRecord) -> None:
    """Compares neighbouring versions."""
    for i, member in attempt.members.items():
      versions = [version for version, _ in member.versions]
      if any(a > b for a, b in itertools.pairwise(versions)):
        self.report(f"{attempt} member {i}: versions fall: {versions}")


class FirstVersion(AttemptInvariant):
  """F is the oldest first token of the members that make up the group."""

  def check(self, attempt: lifecycle.AttemptRecord) -> None:
    """Compares the logged first versions with those of the sequences."""
    for i, member in attempt.members.items():
      logged, sampled = member.first_version, _first(member)
      if logged is not None and sampled is not None and logged != sampled:
        self.report(
          f"{attempt} member {i}: its first token was of version {logged}, its "
          f"sequence begins with {sampled}"
        )
    if not attempt.trained:
      return
    chosen = attempt.trained["members"]
    firsts = [
      _first(attempt.members[i]) for i in chosen if i in attempt.members
    ]
    oldest = min([f for f in firsts if f is not None], default=None)
    for event in (attempt.ready, attempt.trained):
      if event and oldest is not None and event["first_version"] != oldest:
        self.report(
          f"{attempt}: {event['kind']} as if begun at "
          f"{event['first_version']}, but its first token is of version "
          f"{oldest}"
        )


def _first(member: lifecycle.MemberRecord) -> int | None:
  return member.versions[0][0] if member.versions else None


class BoundedStaleness(AttemptInvariant):
  """T - F is at most eta, and never below 0."""

  def check(self, attempt: lifecycle.AttemptRecord) -> None:
    """Compares the staleness of a trained group with the bound."""
    if not attempt.trained:
      return
    trained, began = (
      attempt.trained["version"],
      attempt.trained["first_version"],
    )
    if not 0 <= trained - began <= self.schedule.max_staleness:
      self.report(
        f"{attempt}: trained at version {trained} but began at {began}; the "
        f"bound is {self.schedule.max_staleness}"
      )


class TrainedInItsRound(AttemptInvariant):
  """A group is trained in the round that took it."""

  def check(self, attempt: lifecycle.AttemptRecord) -> None:
    """Compares the versions of both events."""
    if not (attempt.trained and attempt.dequeued):
      return
    taken, trained = attempt.dequeued["version"], attempt.trained["version"]
    if taken != trained:
      self.report(
        f"{attempt}: taken in round {taken} but trained in round {trained}"
      )


class OneVersion(AttemptInvariant):
  """A sequence has one version: weights change only between sequences."""

  @staticmethod
  def binds(schedule: overlap.Overlap) -> bool:
    """Those that drain engines before weights change."""
    return schedule.on_publish == "drain"

  def check(self, attempt: lifecycle.AttemptRecord) -> None:
    """Counts the versions of each member."""
    for i, member in attempt.members.items():
      versions = sorted({version for version, _ in member.versions})
      if len(versions) > 1:
        self.report(f"{attempt} member {i}: sampled by versions {versions}")


class OnPolicy(AttemptInvariant):
  """With a bound of 0 every token of round k has version k."""

  @staticmethod
  def binds(schedule: overlap.Overlap) -> bool:
    """Those with a bound of 0."""
    return schedule.max_staleness == 0

  def check(self, attempt: lifecycle.AttemptRecord) -> None:
    """Looks for tokens of other versions in a trained group."""
    if not attempt.trained:
      return
    round_ = attempt.trained["version"]
    for i in attempt.trained["members"]:
      runs = attempt.members[i].versions if i in attempt.members else ()
      others = sorted({version for version, _ in runs} - {round_})
      if others:
        self.report(
          f"{attempt} member {i} of round {round_}: tokens of {others}"
        )


class OneStepOff(AttemptInvariant):
  """The lag is exactly 1; in the first round, which nothing precedes, 0.

  An attempt that is played again, after a drop or a restart, may be younger.
  """

  @staticmethod
  def binds(schedule: overlap.Overlap) -> bool:
    """Strict pipelines; groups behind a hard frontier may begin later."""
    return (
      schedule.drains
      and schedule.max_staleness == 1
      and schedule.consume == "submit"
      and schedule.admission != "hard_frontier"
    )

  def check(self, attempt: lifecycle.AttemptRecord) -> None:
    """Looks at the lag of a first attempt."""
    if not attempt.trained or attempt.number or attempt.replayed:
      return
    trained = attempt.trained["version"]
    lag = trained - attempt.trained["first_version"]
    if lag != min(trained, 1):
      self.report(f"{attempt}: trained in round {trained} with a lag of {lag}")


INVARIANTS = (
  WholeGroups,
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
