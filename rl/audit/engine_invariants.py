"""Promises about engines: their switches, their versions and their sessions."""

import dataclasses
import math
from collections.abc import Sequence

from rl.audit import event_log, invariant, lifecycle

_WHOLE = ("staged", *event_log.OF_SWITCH)
_ANY = "any"
_name = lifecycle.name_of


class SwitchesEnclosed(invariant.Invariant):
  """Each engine switches once in a publish, between its suspend and resume.

  A switch that fails is only resumed from, and then nothing is published. An
  engine that is lost or has left takes no part, and one that comes back or
  joins has the weights.
  """

  def __init__(self, context: invariant.Context):
    super().__init__(context)
    self._open: int | None = None
    self._steps: dict[int, tuple[str, ...]] = {}
    self._engines: set[int] = set()
    self._lost: set[int] = set()

  def _on_admitted(self, event: event_log.Event) -> None:
    self._engines.add(event["engine"])

  def _on_engine_lost(self, event: event_log.Event) -> None:
    self._lost.add(event["engine"])

  def _on_engine_back(self, event: event_log.Event) -> None:
    self._lost.discard(event["engine"])
    self._engines.add(event["engine"])
    if event["version"] == self._open:
      self._steps[event["engine"]] = _WHOLE

  _on_engine_joined = _on_engine_back

  def _on_engine_left(self, event: event_log.Event) -> None:
    self._lost.discard(event["engine"])
    self._engines.discard(event["engine"])

  def _on_resumed(self, event: event_log.Event) -> None:
    self._engines &= set(range(event["engines"]))

  def _on_publish_start(self, event: event_log.Event) -> None:
    self._open, self._steps = event["version"], {}

  def _on_staged(self, event: event_log.Event) -> None:
    self._engines.add(event["engine"])
    self._step(event)

  _on_decode_suspended = _on_switched = _on_decode_resumed = _on_staged

  def _step(self, event: event_log.Event) -> None:
    kind, version, engine = event["kind"], event["version"], event["engine"]
    which = f"engine {engine}: {kind} of version {version}"
    if version != self._open:
      self.report(f"{which} while {self._open or 'nothing'} is published")
    before = self._steps.get(engine, ())
    self._steps[engine] = (*before, kind)
    failed = (*before, kind) == ("staged", "decode_suspended", "decode_resumed")
    if before != _WHOLE[: _WHOLE.index(kind)] and not failed:
      self.report(f"{which} after {', '.join(before) or 'nothing'}")

  def _on_published(self, event: event_log.Event) -> None:
    version, self._open = event["version"], None
    if event.get("restarted"):
      return
    for engine in sorted(self._engines - self._lost):
      steps = self._steps.get(engine, ())
      if steps != _WHOLE:
        told = ", ".join(steps) or "nothing"
        self.report(
          f"engine {engine}: version {version} was published after {told}"
        )


@dataclasses.dataclass(slots=True)
class _Play:
  """An episode under way.

  Attributes:
    first: version that its engine served when it was admitted.
    last: that, or at its last turn, which was logged at `last_t`.
    turns: (tokens, lowest, highest version that they can have).
  """

  engine: int
  first: int
  last: int
  last_t: float
  turns: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)


class ServedVersions(invariant.Invariant):
  """An episode begins, and samples each token, under what its engine serves.

  So none begins below a published version, and no token of a version follows
  the switch to the next. An engine that comes back or joins serves the newest:
  the last to be published or, from the first switch to it on, the next.

  An answer is sampled before its turn is logged, and asked for after the turn
  before it, unless an agent asks for several at once: then it takes longer than
  the time between the two.
  """

  RECORDS = (_Play,)

  def __init__(self, context: invariant.Context):
    super().__init__(context)
    self._served: dict[int, int] = {}
    self._since = 0
    self._newest = 0
    self._open: int | None = None
    self._plays: dict[tuple[int, int, int], _Play] = {}

  def _on_switched(self, event: event_log.Event) -> None:
    self._served[event["engine"]] = event["version"]
    self._newest = max(self._newest, event["version"])

  def _on_engine_back(self, event: event_log.Event) -> None:
    engine, version = event["engine"], event["version"]
    if not self._newest <= version <= (self._open or self._newest):
      how = "joined" if event["kind"] == "engine_joined" else "came back"
      self.report(
        f"engine {engine} {how} with version {version}, although "
        f"{self._newest} is the newest"
      )
    self._on_switched(event)

  _on_engine_joined = _on_engine_back

  def _on_publish_start(self, event: event_log.Event) -> None:
    self._open = event["version"]

  def _on_published(self, event: event_log.Event) -> None:
    self._newest, self._open = max(self._newest, event["version"]), None
    if event.get("restarted"):
      self._since = event["version"]
      self._served.clear()

  def _on_resumed(self, event: event_log.Event) -> None:
    self._since = event["trained"]
    self._served.clear()

  def _serves(self, engine: int) -> int:
    return self._served.get(engine, self._since)

  def _on_admitted(self, event: event_log.Event) -> None:
    engine, version = event["engine"], event["version"]
    if version != self._serves(engine):
      self.report(
        f"{_name(event)}: admitted at version {version} by engine {engine}, "
        f"which serves {self._serves(engine)}"
      )
    served = self._serves(engine)
    play = _Play(engine, served, served, event["t"])
    self._plays[event_log.member(event)] = play

  def _on_moved(self, event: event_log.Event) -> None:
    if (play := self._plays.get(_place(event["session"]))) is not None:
      play.engine = event["engine"]

  def _on_continued(self, event: event_log.Event) -> None:
    if (play := self._plays.get(event_log.member(event))) is None:
      return
    if event["first_version"] is not None:
      play.first = play.last = min(play.first, event["first_version"])
    play.turns += [(count, v, v) for v, count in event["versions"]]

  def _on_first_token(self, event: event_log.Event) -> None:
    if (play := self._plays.get(event_log.member(event))) is None:
      return
    low, high = play.first, self._serves(play.engine)
    if not low <= event["version"] <= high:
      self.report(
        f"{_name(event)}: its first token is of version {event['version']}; "
        f"its engine served {low} to {high}"
      )

  def _on_turn(self, event: event_log.Event) -> None:
    if (play := self._plays.get(event_log.member(event))) is None:
      return
    served = self._serves(play.engine)
    asked_t = event["t"] - event["env_s"] - event["decode_s"]
    low = (
      play.last if asked_t >= play.last_t - invariant.ROUNDING_S else play.first
    )
    play.turns.append((event["tokens"], low, served))
    play.last, play.last_t = served, event["t"]

  def _on_ended(self, event: event_log.Event) -> None:
    if (play := self._plays.pop(event_log.member(event), None)) is None:
      return
    if violation := _impossible(event["versions"], play.turns):
      self.report(f"{_name(event)}: {violation}")

  _on_aborted = _on_ended


class LostEngines(invariant.Invariant):
  """No session begins on a lost engine, and only those of one move, elsewhere.

  Those of one that is to leave may move too. An engine is lost once until it
  comes back, after its last restart began, or is given up. Restarts are counted
  from 1.
  """

  def __init__(self, context: invariant.Context):
    super().__init__(context)
    self._lost: set[int] = set()
    self._ever_lost: set[int] = set()
    self._attempts: dict[int, int] = {}
    self._begins_t: dict[int, float] = {}
    self._homes: dict[tuple[int, int, int], int] = {}

  def _on_engine_lost(self, event: event_log.Event) -> None:
    if event["engine"] in self._lost:
      self.report(f"engine {event['engine']} was lost again")
    self._lost.add(event["engine"])
    self._ever_lost.add(event["engine"])

  def _on_engine_leaving(self, event: event_log.Event) -> None:
    self._ever_lost.add(event["engine"])

  def _on_engine_left(self, event: event_log.Event) -> None:
    self._lost.discard(event["engine"])

  def _on_engine_restarting(self, event: event_log.Event) -> None:
    engine, attempt = event["engine"], event["attempt"]
    before = self._attempts.get(engine, 0)
    if engine not in self._lost:
      self.report(f"engine {engine} is restarted, but was not lost")
    if attempt not in (1, before + 1):
      self.report(f"engine {engine}: restart {attempt} after {before}")
    self._check_begun(event)
    self._attempts[engine] = attempt
    self._begins_t[engine] = event["t"] + event["wait_s"]

  def _on_engine_back(self, event: event_log.Event) -> None:
    engine = event["engine"]
    if engine not in self._lost:
      self.report(f"engine {engine} came back, but was not lost")
    elif not event.get("restarted"):
      if engine not in self._begins_t:
        self.report(f"engine {engine} came back, but was not restarted")
      self._check_begun(event)
    self._lost.discard(engine)
    self._begins_t.pop(engine, None)

  def _on_engine_given_up(self, event: event_log.Event) -> None:
    engine, attempts = event["engine"], event["attempts"]
    before = self._attempts.get(engine, 0)
    if engine not in self._lost or attempts != before:
      self.report(
        f"engine {engine} is given up after {attempts} restarts; there were "
        f"{before}"
      )
    self._check_begun(event)
    self._begins_t.pop(engine, None)

  def _check_begun(self, event: event_log.Event) -> None:
    """Reports an end of a restart that had not begun."""
    begins_t = self._begins_t.get(event["engine"], -math.inf)
    if event["t"] < begins_t - invariant.ROUNDING_S:
      self.report(
        f"engine {event['engine']}: {event['kind']} at {event['t']:g} s, but "
        f"its restart begins at {begins_t:g} s"
      )

  def _on_admitted(self, event: event_log.Event) -> None:
    self._homes[event_log.member(event)] = event["engine"]
    if event["engine"] in self._lost:
      self.report(f"{_name(event)}: admitted by an engine that is lost")

  def _on_moved(self, event: event_log.Event) -> None:
    place, engine = _place(event["session"]), event["engine"]
    before = self._homes.get(place, -1)
    if engine in self._lost or (before >= 0 and before not in self._ever_lost):
      self.report(f"session {event['session']} moved from {before} to {engine}")
    if before >= 0:
      self._homes[place] = engine

  def _on_ended(self, event: event_log.Event) -> None:
    self._homes.pop(event_log.member(event), None)

  _on_aborted = _on_ended


class Members(invariant.Invariant):
  """An engine that is to leave gets no work that another could take.

  No session begins on it while another engine serves, and none begins, moves or
  samples its first token on one that has left. Whatever joins was not there,
  and whatever leaves was to leave, or lost.
  """

  def __init__(self, context: invariant.Context):
    super().__init__(context)
    self._serving: set[int] = set()
    # Engines that have had a session: those that only encode never have one.
    self._decoding: set[int] = set()
    self._leaving: set[int] = set()
    self._lost: set[int] = set()
    self._left_t: dict[int, float] = {}
    self._homes: dict[tuple[int, int, int], int] = {}

  def _on_staged(self, event: event_log.Event) -> None:
    if event["engine"] in self._left_t:
      self.report(f"engine {event['engine']}: {event['kind']} after it left")
    elif event["engine"] not in self._leaving | self._lost:
      self._serving.add(event["engine"])

  _on_decode_suspended = _on_switched = _on_decode_resumed = _on_staged

  def _on_engine_joined(self, event: event_log.Event) -> None:
    engine = event["engine"]
    if not event.get("restarted") and engine in self._there:
      self.report(f"engine {engine} joined, but was there")
    self._left_t.pop(engine, None)
    self._leaving.discard(engine)
    self._serving.add(engine)

  @property
  def _there(self) -> set[int]:
    return self._serving | self._leaving | self._lost

  def _on_engine_leaving(self, event: event_log.Event) -> None:
    engine = event["engine"]
    if engine in {*self._leaving, *self._lost, *self._left_t}:
      self.report(f"engine {engine} is to leave, but is lost or leaves already")
    self._serving.discard(engine)
    self._leaving.add(engine)

  def _on_engine_left(self, event: event_log.Event) -> None:
    engine = event["engine"]
    was_told = engine in self._leaving | self._lost
    if not was_told and not event.get("restarted"):
      self.report(f"engine {engine} left, but was neither to leave nor lost")
    for engines in (self._serving, self._leaving, self._lost):
      engines.discard(engine)
    self._left_t[engine] = event["t"]

  def _on_resumed(self, event: event_log.Event) -> None:
    own = set(range(event["engines"]))
    self._serving &= own
    self._decoding &= own
    # One that had joined may have had the number of one of the run's own.
    for engine in self._left_t.keys() & own:
      del self._left_t[engine]

  def _on_engine_lost(self, event: event_log.Event) -> None:
    engine = event["engine"]
    if engine in self._left_t:
      self.report(f"engine {engine} was lost after it had left")
    self._serving.discard(engine)
    self._leaving.discard(engine)
    self._lost.add(engine)

  def _on_engine_back(self, event: event_log.Event) -> None:
    self._lost.discard(event["engine"])
    self._serving.add(event["engine"])

  def _on_admitted(self, event: event_log.Event) -> None:
    engine = event["engine"]
    self._homes[event_log.member(event)] = engine
    if engine in self._left_t:
      self.report(f"{_name(event)}: admitted by an engine that has left")
    elif engine in self._leaving and (able := self._serving & self._decoding):
      self.report(
        f"{_name(event)}: admitted by engine {engine}, which is to leave, "
        f"although engine {min(able)} serves"
      )
    elif engine not in self._leaving | self._lost:
      self._serving.add(engine)
    self._decoding.add(engine)

  def _on_moved(self, event: event_log.Event) -> None:
    place, engine = _place(event["session"]), event["engine"]
    if engine in self._left_t:
      self.report(
        f"session {event['session']} moved to an engine that has left"
      )
    self._decoding.add(engine)
    if place in self._homes:
      self._homes[place] = engine

  def _on_first_token(self, event: event_log.Event) -> None:
    engine = self._homes.get(event_log.member(event), -1)
    left_t = self._left_t.get(engine, math.inf)
    if event["t"] > left_t + invariant.ROUNDING_S:
      self.report(f"{_name(event)}: its first token is of an engine that left")

  def _on_ended(self, event: event_log.Event) -> None:
    self._homes.pop(event_log.member(event), None)

  _on_aborted = _on_ended


class RoutedSessions(invariant.Invariant):
  """A session is in the pool that its source prefers, or a fallback is told.

  The fallback comes right before the session begins or moves.
  """

  def __init__(self, context: invariant.Context):
    super().__init__(context)
    self._names: dict[int, tuple[str, ...]] = {}
    self._preferences: dict[str, str] = {}
    self._sources: dict[tuple[int, int], str] = {}
    self._told: event_log.Event | None = None

  def _on_engine_pool(self, event: event_log.Event) -> None:
    hardware = () if event["hardware"] == _ANY else (event["hardware"],)
    self._names[event["engine"]] = (event["pool"], *hardware)

  def _on_preference(self, event: event_log.Event) -> None:
    self._preferences[event["source"]] = event["wanted"]
    self._told = None  # A restart: its session begins once more.

  def _on_submitted(self, event: event_log.Event) -> None:
    self._sources[event["group"], event["attempt"]] = event["source"]

  def _on_dropped(self, event: event_log.Event) -> None:
    self._sources.pop((event["group"], event["attempt"]), None)

  _on_trained = _on_dropped

  def _on_fallback(self, event: event_log.Event) -> None:
    self._told = event

  def _on_admitted(self, event: event_log.Event) -> None:
    self._check(event_log.member(event), event["engine"])

  def _on_moved(self, event: event_log.Event) -> None:
    self._check(_place(event["session"]), event["engine"])

  def _check(self, place: tuple[int, int, int], engine: int) -> None:
    told, self._told = self._told, None
    if told is not None and _place(told["session"]) != place:
      told = None
    source = self._sources.get(place[:2])
    if source is None:
      return
    wanted = self._preferences.get(source, self._preferences.get("", _ANY))
    known = any(wanted in names for names in self._names.values())
    fits = not known or wanted in self._names.get(engine, ())
    where = (
      f"{lifecycle.name(*place[:2])} member {place[2]}: on engine {engine}"
    )
    if fits and told is not None:
      self.report(f"{where} a fallback is told, which it is not")
    elif not fits and told is None:
      self.report(f"{where} although {source} prefers {wanted}; no word of it")
    elif told is not None and (told["wanted"], told["engine"]) != (
      wanted,
      engine,
    ):
      self.report(
        f"{where} for want of {wanted}; the fallback tells of "
        f"{told['engine']} for {told['wanted']}"
      )


def _impossible(
  runs: event_log.Runs, turns: Sequence[tuple[int, int, int]]
) -> str:
  """Returns why turns cannot hold tokens of such versions; "" if they can."""
  if sum([count for _, count in runs]) != sum([turn[0] for turn in turns]):
    return ""  # Which is another violation.
  for edge in sorted({v + i for v, _ in runs for i in (0, 1)}):
    older = sum([count for version, count in runs if version < edge])
    room = sum([count for count, low, _ in turns if low < edge])
    if older > room:
      return (
        f"{older} tokens are older than version {edge}, but at most {room} "
        "were asked for before the switch to it"
      )
    newer = sum([count for version, count in runs if version >= edge])
    room = sum([count for count, _, high in turns if high >= edge])
    if newer > room:
      return (
        f"{newer} tokens are of version {edge} or newer, but at most {room} "
        "were sampled after the switch to it"
      )
  return ""


def _place(session: str) -> tuple[int, int, int]:
  """Returns group, attempt and index of a session; see `Episode.name`."""
  try:
    group, attempt, index = map(int, session.split("/")[-3:])
  except ValueError:
    return -1, -1, -1  # Nobody's that is trained.
  return group, attempt, index


INVARIANTS = (
  SwitchesEnclosed,
  ServedVersions,
  LostEngines,
  Members,
  RoutedSessions,
)
