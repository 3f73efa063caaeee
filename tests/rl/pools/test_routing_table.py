"""Tests of who is where: sessions stay, move, fall back and return."""

import random

import pytest

from rl.pools import affinity, placement, routing_table

FAST, WIDE = (
  placement.EngineInfo("fast", "compute"),
  placement.EngineInfo("wide", "bandwidth"),
)
MATH = affinity.Routing(prefer={"math": "wide"})


def alike(count, max_sessions=100):
  infos = [placement.EngineInfo("decode")] * count
  return routing_table.RoutingTable(infos, affinity.Routing(), max_sessions)


def bindings(table):
  """Returns the engine of every assigned session that has one."""
  bound = {name: one.engine for name, one in table._sessions.items()}
  return {name: i for name, i in bound.items() if i is not None}


def sent(table, *args):
  """Sends a request, and returns its engines, as not all are lost."""
  found = table.send(*args)
  assert found is not None
  return found


class Asked:
  """Sends requests that have names by themselves."""

  def __init__(self, table):
    self.table, self.names = table, []

  def __call__(self, session):
    name = f"r{len(self.names)}"
    self.names.append(name)
    choice = self.table.send(name, session)
    return None if choice is None else choice.engine


def test_a_session_stays_and_a_new_one_goes_where_the_least_is_to_do():
  table = alike(3)
  ask = Asked(table)
  # The first of equals; then 2 requests at 0 and one at each other.
  assert [ask(name) for name in "abcd"] == [0, 1, 2, 0]
  table.answered("r1")
  assert [ask(name) for name in "ae"] == [0, 1]
  table.lose(1, 0)
  assert [ask(name) for name in "bef"] == [2, 2, 0]
  table.lose(0, 0)
  table.lose(2, 0)
  assert ask("a") is None
  assert table.assign("g", "math") is None


def test_a_session_of_before_a_restart_gets_its_engine_again_if_it_may():
  table = alike(3)
  for name, engine in (("a", 2), ("b", 2), ("c", -1)):
    table.assign(name, "", engine)
  table.lose(2, 0)
  table.assign("d", "", 2)
  table.assign("e", "", 7)  # There are fewer now.
  assert bindings(table) == {"c": 0, "d": 1, "e": 0}
  assert table.counts.sessions["decode", ""] == 5
  mapped = routing_table.RoutingTable((FAST, WIDE), MATH)
  mapped.assign("f", "math", 0)
  assert bindings(mapped) == {"f": 1}


def test_members_of_a_group_follow_each_other_while_groups_spread():
  table = alike(2)
  for name in ("a/0", "b/0", "a/1", "b/1", "c/0", "a/2"):
    table.assign(name, "", group=name[0])
  # "c" comes to the first of equals.
  engines = {"a/0": 0, "a/1": 0, "a/2": 0, "b/0": 1, "b/1": 1, "c/0": 0}
  assert bindings(table) == engines
  assert (table.counts.prompts_shared, table.counts.prompts_repeated) == (3, 0)
  table.lose(0, 0)
  for name in ("a/0", "c/0", "a/1", "a/2"):
    table.move(name, (0, 0))
  table.recover(0)
  table.assign("b/2", "", group="b")  # With 4 of others, and 0 elsewhere.
  table.assign("d/0", "", group="d")
  assert (bindings(table)["b/2"], bindings(table)["d/0"]) == (1, 0)
  for name in bindings(table):
    table.end(name)
  assert not table._groups
  table.assign("b/3", "", group="b")  # It may long have been evicted.
  assert (table.counts.prompts_shared, table.counts.prompts_repeated) == (4, 0)


@pytest.mark.parametrize(
  ("settings", "engines"),
  [
    # 2 + 1 sessions are more than twice the 0 + 1 of the other.
    ({"overload": 2.0}, [0, 0, 1, 1]),
    ({"share_prompts": False}, [0, 1, 0, 1]),
  ],
)
def test_members_leave_an_engine_that_is_overloaded(settings, engines):
  infos = [placement.EngineInfo("decode")] * 2
  table = routing_table.RoutingTable(infos, affinity.Routing(**settings))
  for i in range(4):
    table.assign(str(i), "", group="a")
  assert list(bindings(table).values()) == engines
  assert (table.counts.prompts_shared, table.counts.prompts_repeated) == (2, 1)


def test_a_group_over_two_pools_has_one_engine_in_each():
  infos = [FAST, FAST, WIDE, WIDE]
  table = routing_table.RoutingTable(infos, MATH)
  domains = {"a": "math", "b": "", "c": "math", "d": ""}
  for name, domain in domains.items():
    table.assign(name, domain, group="g")
  assert bindings(table) == {"a": 2, "b": 0, "c": 2, "d": 0}


def test_the_session_not_seen_for_longest_is_forgotten():
  table = alike(2, max_sessions=2)
  ask = Asked(table)
  # At 0, at 1, again at 0; "c" goes to 1, and "b" is the one to go.
  assert [ask(name) for name in "abac"] == [0, 1, 0, 1]
  table.answered("r0")
  assert len(table._homes) == 2
  assert ask("b") == 0


def test_a_session_that_began_counts_once_whatever_it_asks():
  table = alike(2)
  ask = Asked(table)
  assert table.assign("a", "") == (0, "")
  assert [ask("a"), ask("a")] == [0, 0]
  assert table.load == [1, 0]
  with pytest.raises(ValueError, match="session a has begun already"):
    table.assign("a", "")
  table.end("a")
  table.end("a")
  table.answered("r0")
  assert table.load == [0, 0]
  assert bindings(table) == {}
  with pytest.raises(ValueError, match="request r0 is not in flight"):
    table.engine_of("r0")
  with pytest.raises(ValueError, match="request r1 is already in flight"):
    table.send("r1", "b")


def test_all_of_a_mapped_domain_land_on_its_pool_and_others_by_default():
  routing = affinity.Routing(prefer={"math": "bandwidth"}, default="fast")
  table = routing_table.RoutingTable([FAST, WIDE, WIDE], routing)
  for i in range(300):
    domain = ("math", "chess", "")[i % 3]
    choice = table.assign(f"s{i}", domain)
    assert choice is not None
    assert choice.missed == ""
    # Of two wide engines the emptier: one after the other.
    assert choice.engine == (1 + (i // 3) % 2 if domain == "math" else 0)
  assert table.counts.sessions == {
    ("wide", "math"): 100,
    ("fast", "chess"): 100,
    ("fast", ""): 100,
  }
  assert table.counts.fallbacks == 0
  # A session that never began is one of no domain.
  assert sent(table, "r", "unheard")[:2] == (0, "")


def test_a_pool_that_is_down_is_left_at_once_and_taken_again_when_it_is_back():
  table = routing_table.RoutingTable([FAST, WIDE, WIDE], MATH)
  assert [table.assign(n, "math") for n in "ab"] == [(1, ""), (2, "")]
  table.lose(1, 0)
  assert bindings(table) == {"b": 2}
  assert table.assign("c", "math") == (2, "")
  table.lose(2, 0)
  assert table.assign("d", "math") == (0, "wide")
  assert table.must_move("a")
  assert table.move("a", [0, 0, 0]) == (0, "wide")
  assert sent(table, "s", "a")[:2] == (0, "")
  assert (table.counts.fallbacks, table.counts.moved) == (2, 1)
  table.recover(2)
  assert table.assign("e", "math") == (2, "")
  # Who fell back stays where its keys and values are.
  assert sent(table, "t", "d")[:2] == (0, "")
  assert bindings(table) == {"a": 0, "d": 0, "e": 2}
  assert (table.counts.fallbacks, table.counts.returns) == (2, 1)
  described = table.describe()
  assert described["engines_lost"] == 1.0
  assert described["route_fallbacks"] == 2.0
  assert described["sessions/wide/math"] == 4.0
  assert described["sessions/fast/math"] == 1.0


def test_an_overloaded_pool_is_left_and_counted():
  routing = affinity.Routing(prefer={"math": "wide"}, overload=2.0)
  table = routing_table.RoutingTable([FAST, WIDE], routing)
  chosen = [table.assign(f"s{i}", "math") for i in range(7)]
  # With it there would be 1, 2 | 3 against 1 | 3, 4 against 2 | 5 against 2.
  away = [choice.engine == 0 for choice in chosen if choice is not None]
  assert away == [False, False, True, False, False, True, False]
  assert (table.counts.fallbacks, table.counts.returns) == (2, 2)


def test_a_preferred_pool_that_drains_is_waited_for():
  table = routing_table.RoutingTable([FAST, WIDE], MATH)
  table.drain(1)
  assert table.assign("a", "math") is None
  table.update(1)
  assert table.assign("a", "math") is None
  assert table.assign("b", "chess") == (0, "")
  table.reopen(1)
  assert table.assign("a", "math") == (1, "")
  table.drain(1)
  table.lose(1, 0)
  assert table.assign("c", "math") == (0, "wide")
  assert table.counts.fallbacks == 1


def test_an_engine_drains_until_what_began_on_it_has_ended():
  table = alike(2)
  ask = Asked(table)
  assert table.assign("a", "") == (0, "")
  assert ask("unheard") == 1
  for number in (0, 1):
    table.drain(number)
  assert [table.drained(number) for number in (0, 1)] == [False, True]
  assert table.assign("b", "") is None
  # Who is there goes on, and who never began is not held up.
  assert [ask("a"), ask("unheard")] == [0, 1]
  with pytest.raises(ValueError, match="engine 0 has sessions"):
    table.update(0)
  with pytest.raises(ValueError, match="engine 0 is draining, not open"):
    table.drain(0)
  table.end("a")
  table.update(0)
  assert table.assign("b", "") is None
  table.reopen(0)
  assert table.assign("b", "") == (0, "")
  with pytest.raises(ValueError, match="engine 0 is open, not lost"):
    table.recover(0)


def test_who_loses_its_engine_goes_where_its_weights_still_are():
  table = alike(3)
  for name in "abc":
    table.assign(name, "")
  for number in (0, 1, 2):
    table.drain(number)
  table.end("a")
  table.update(0)
  table.reopen(0)
  # 0 has the new weights and 1 the old ones, which "c" began with.
  table.lose(2, 5)
  with pytest.raises(ValueError, match="session c has lost its engine"):
    table.send("r", "c")
  assert table.move("c", [6, 5, 5]) == (1, "")
  assert not table.drained(1)
  table.lose(1, 5)
  assert table.move("c", [6, 5, 5]) == (0, "")
  assert table.counts.moved == 2


def test_an_engine_that_is_to_leave_takes_sessions_only_while_it_is_the_last():
  table = alike(2)
  ask = Asked(table)
  assert table.assign("a", "") == (0, "")
  assert ask("unbound") == 1
  table.leave(0)
  table.leave(1)
  assert not table.may_remove(0)
  assert table.assign("b", "") == (0, "")
  joins = table.expect(placement.EngineInfo("decode"))
  assert joins == 2
  assert table.serving == [0, 1]
  assert table.recover(joins)
  assert [table.assign(name, "") for name in "cd"] == [(2, "")] * 2
  assert ask("unbound") == 2
  # Its request of before is not answered yet.
  assert not table.may_remove(1)
  table.answered("r0")
  assert table.may_remove(1)
  table.remove(1, 0)
  assert table.serving == [0, 2]
  assert table.describe()["engines_lost"] == 0.0
  with pytest.raises(ValueError, match="engine 1 is left, not lost"):
    table.recover(1)


def test_sessions_of_one_that_is_to_leave_move_unless_engines_drain():
  table = alike(2)
  ask = Asked(table)
  for name in "ab":
    assert table.assign(name, "", 0) == (0, "")
  assert ask("a") == 0
  table.leave(0)
  assert table.must_move("a")
  assert table.move("a", [3, 4]) == (1, "")
  # Its first request goes on where it was.
  assert table.engine_of("r0") == 0
  assert not table.may_remove(0)
  table.answered("r0")
  assert table.may_remove(0)
  table.one_version = True
  assert not table.must_move("b")
  assert not table.may_remove(0)
  table.one_version = False
  table.remove(0, 3)
  assert table.must_move("b")
  # The other one lags behind.
  assert table.move("b", [3, 2]) is None
  assert table.move("b", [3, 3]) == (1, "")
  table.end("a")
  table.end("b")
  assert table.load == [0, 0]


def test_a_session_that_was_lost_may_take_a_leaving_engine_of_its_version():
  table = one_version(3, sampled=True)
  table.leave(1)
  assert table.move("a", [5, 5, 6]) == (1, "")


def test_versions_of_a_session_never_fall_when_it_moves():
  table = alike(3)
  table.assign("a", "")
  table.lose(0, 6)
  # The others have not been given version 6 yet.
  table.drain(1)
  assert table.move("a", [6, 5, 5]) is None
  assert table.must_move("a")
  table.update(1)
  # Rather one that serves than one at which it would wait ...
  assert table.move("a", [6, 6, 7]) == (2, "")
  table.lose(2, 7)
  # ... but there rather than nowhere.
  assert table.move("a", [6, 7, 7]) == (1, "")
  assert not table.must_move("a")


def test_what_a_session_took_counts_when_it_ends_where_it_was():
  table = routing_table.RoutingTable([FAST, WIDE], affinity.Routing(learn=True))
  took = affinity.Sample(1.0, 10.0, 2.0, 5.0)
  assert table.assign("a", "math") == (0, "")
  table.measure("a", 0, took)
  table.measure("a", 0, took)
  table.measure("a", 1, took)
  table.measure("unheard", 0, took)
  assert table.seconds == {}
  table.end("a")
  # Two requests of 3 s.
  assert table.seconds == {("math", "fast"): pytest.approx(6.0)}
  assert table.assign("b", "math") == (1, "")
  table.measure("b", 1, took)
  table.lose(1, 0)
  table.move("b", [0, 0])
  table.end("b")
  # What it took until then was elsewhere.
  assert table.seconds == {("math", "fast"): pytest.approx(6.0)}
  name = "session_s/fast/math"
  assert table.describe()[name] == pytest.approx(6.0)


def one_version(count, *, sampled):
  """Returns a table of which session "a" has lost engine 0 at version 5."""
  infos = [placement.EngineInfo("decode")] * count
  table = routing_table.RoutingTable(infos, affinity.Routing())
  table.one_version = True
  table.assign("a", "")
  if sampled:
    table.measure("a", 0, affinity.Sample(), 5)
  table.lose(0, 5)
  return table


def test_a_session_with_tokens_moves_where_their_version_is_or_not_at_all():
  table = one_version(4, sampled=True)
  table.drain(1)
  assert table.move("a", [5, 5, 6, 6]) == (1, "")
  table.lose(1, 5)
  # 2 is to have that version yet.
  assert table.move("a", [5, 5, 4, 6]) is None
  assert table.move("a", [5, 5, 5, 6]) == (2, "")
  table.lose(2, 5)
  with pytest.raises(ValueError, match="tokens of version 5, which no engine"):
    table.move("a", [5, 5, 5, 6])
  table.lose(3, 6)
  assert table.move("a", [5, 5, 5, 6]) is None


def test_a_session_without_tokens_may_begin_with_newer_weights():
  table = one_version(2, sampled=False)
  assert table.move("a", [5, 4]) is None
  assert table.move("a", [5, 6]) == (1, "")


def test_no_session_that_is_waited_for_moves_to_an_engine_in_its_update():
  tables = [one_version(2, sampled=sampled) for sampled in (False, True)]
  for table in tables:
    table.drain(1)
    table.update(1)
  # It could get a token of the old weights there, and then of the new ones.
  assert tables[0].move("a", [5, 5]) is None
  with pytest.raises(ValueError, match="tokens of version 5, which no engine"):
    tables[1].move("a", [5, 5])
  tables[0].reopen(1)
  assert tables[0].move("a", [5, 6]) == (1, "")


def test_tokens_count_whose_engine_was_lost_meanwhile():
  table = one_version(2, sampled=False)
  table.measure("a", 0, affinity.Sample(), 5)
  with pytest.raises(ValueError, match="tokens of version 5, which no engine"):
    table.move("a", [5, 6])


def phases(prefill=2):
  """Returns a table of an engine that decodes, 0, and others that encode."""
  encode = placement.EngineInfo("encode", "compute", "prefill")
  return routing_table.RoutingTable(
    [placement.EngineInfo(), *[encode] * prefill],
    affinity.Routing(min_prefill_ids=100),
  )


def test_new_ids_are_encoded_by_the_engine_with_the_least_to_encode():
  table = phases()
  for name in "abc":
    # An engine that only encodes has no session.
    assert table.assign(name, "") == (0, "")
  versions = [4, 4, 4]
  begun = [sent(table, f"r{x}", x, 100, versions) for x in "abc"]
  assert [x[3:] for x in begun] == [(1, 0), (2, 0), (1, 0)]
  table.encoded("ra")
  table.encoded("rb", "late")
  assert not table.is_encoding("ra")
  assert table.is_encoding("rc")
  table.answered("rc")  # Cancelled while it was encoded.
  table.answered("ra")
  # 100 ids and 30 of the answer are there: 229 - 130 are too few.
  table.measure("a", 0, affinity.Sample(), 4, 130)
  assert sent(table, "s", "a", 229, versions)[3:] == (-1, 0)
  assert sent(table, "t", "a", 230, versions)[3:] == (1, 130)
  # With new weights its engine has forgotten them.
  assert sent(table, "u", "a", 130, [5, 5, 5])[3:] == (2, 0)
  described = table.describe()
  assert described["prefills"] == described["prefills_missed/late"] == 1.0


def test_an_engine_that_encodes_must_serve_and_have_the_same_weights():
  table = phases()
  table.assign("a", "")

  def prefill(name, versions):
    return sent(table, name, "a", 100, versions).prefill

  assert prefill("r", [4, 3, 4]) == 2
  assert prefill("s", [4, 3, 5]) == -1
  table.lose(2, 4)
  table.leave(1)
  assert prefill("t", [4, 4, 4]) == -1
  assert prefill("u", ()) == -1  # Nobody hands over.
  assert sent(table, "v", "unheard", 100, [4, 4, 4]).prefill == -1
  assert table.counts.prefills_missed == {"version": 1, "lost": 1}


def test_an_engine_that_encodes_takes_no_session_of_a_lost_one():
  table = phases(prefill=1)
  table.assign("a", "")
  table.lose(0, 0)
  assert table.all_lost
  assert table.serving == [1]
  assert table.move("a", [0, 0]) is None
  assert table.assign("b", "") is None
  assert table.send("r", "unheard") is None
  table.leave(1)
  assert not table.may_remove(1)
  table.recover(0)
  assert table.may_remove(1)


def test_no_source_can_prefer_a_pool_that_encodes():
  infos = [
    placement.EngineInfo("decode", "bandwidth"),
    placement.EngineInfo("wide", "any"),
    placement.EngineInfo("encode", "compute", "prefill"),
  ]
  for name in ("encode", "compute"):
    routing = affinity.Routing(prefer={"math": name})
    with pytest.raises(ValueError, match=rf"prefer\.math={name} names neither"):
      affinity.Affinity(infos, routing)


@pytest.mark.parametrize("kind", ["any", "compute"])
def test_pools_of_one_kind_are_shared_as_if_there_were_no_settings(kind):
  routing = affinity.Routing(
    learn=True, prefer={"a": "compute", "b": "bandwidth"}, overload=1.0
  )
  infos = [placement.EngineInfo(pool, kind) for pool in ("x", "y", "y")]
  bare = [placement.EngineInfo("decode")] * 3
  tables = (
    routing_table.RoutingTable(infos, routing),
    routing_table.RoutingTable(bare, affinity.Routing()),
  )
  chance, live = random.Random(0), []
  for i in range(1000):
    domain = chance.choice("abc")
    if live and chance.random() < 0.5:
      name = live.pop(chance.randrange(len(live)))
      for table in tables:
        # Seconds that differ from pool to pool must not matter.
        engine = bindings(table)[name]
        took = affinity.Sample(0.0, 0.0, 1.0 + engine, 1.0)
        table.measure(name, engine, took)
        table.end(name)
    else:
      first, second = (table.assign(f"s{i}", domain) for table in tables)
      assert first is not None
      assert first == second
      live.append(f"s{i}")


class Oracle:
  """Where sessions must be, kept another way: by what happened to each."""

  def __init__(self, count):
    self.where = {}
    self.state = ["open"] * count
    self.version = [0] * count
    self.floor = {}
    self.requests = {}

  def held(self, engine):
    return [name for name, at in self.where.items() if at == engine]


@pytest.mark.parametrize("seed", range(5))
def test_sessions_stick_whatever_happens_to_engines_and_others(seed):
  chance = random.Random(seed)
  infos = [FAST, FAST, WIDE, WIDE]
  table = routing_table.RoutingTable(infos, MATH, max_sessions=5)
  oracle = Oracle(len(infos))
  names = [f"s{i}" for i in range(30)]

  def step():
    action = chance.choice(
      ("begin",) * 4 + ("send",) * 6 + ("answer",) * 5 + ("end",) * 3
      + ("lose", "recover", "recover", "drain", "update", "reopen")
    )  # fmt: skip
    name, engine = chance.choice(names), chance.randrange(len(infos))
    if action == "begin" and name not in oracle.where:
      begin(name, chance.choice(("math", "chess")))
    elif action == "send":
      send(name, f"r{len(table.counts.sessions)}-{chance.random()}")
    elif action == "answer" and oracle.requests:
      request = chance.choice(list(oracle.requests))
      assert table.engine_of(request) == oracle.requests.pop(request)
      table.answered(request)
    elif action == "end":
      table.end(name)
      oracle.where.pop(name, None)
    else:
      change(action, engine)

  def begin(name, domain):
    choice = table.assign(name, domain)
    free = [i for i, state in enumerate(oracle.state) if state == "open"]
    wide = [i for i in free if i >= 2]
    soon = {"draining", "updating"} & set(oracle.state[2:])
    if not free or (domain == "math" and not wide and soon):
      assert choice is None
      return
    assert choice is not None
    assert choice.engine in ((wide or free) if domain == "math" else free)
    assert bool(choice.missed) == (domain == "math" and not wide)
    oracle.where[name] = choice.engine

  def send(name, request):
    if oracle.where.get(name, -1) is None:
      assert table.must_move(name)
      move(name)
    if oracle.where.get(name, -1) is None:
      return
    choice = table.send(request, name)
    if set(oracle.state) == {"lost"}:
      assert choice is None
      return
    assert choice is not None
    assert oracle.state[choice.engine] != "lost"
    assert choice.engine == oracle.where.get(name, choice.engine)
    oracle.requests[request] = choice.engine

  def move(name):
    choice = table.move(name, oracle.version)
    able = [
      (state == "updating", version)
      for state, version in zip(oracle.state, oracle.version, strict=True)
      if state != "lost" and version >= oracle.floor[name]
    ]
    assert (choice is None) == (not able)
    if choice is not None:
      engine = oracle.where[name] = choice.engine
      state, version = oracle.state[engine], oracle.version[engine]
      assert (state == "updating", version) == min(able)

  def change(action, engine):
    state = oracle.state[engine]
    if action == "lose" and state != "lost":
      table.lose(engine, oracle.version[engine])
      oracle.state[engine] = "lost"
      oracle.floor |= dict.fromkeys(oracle.held(engine), oracle.version[engine])
      oracle.where |= dict.fromkeys(oracle.held(engine))
    elif action == "recover" and state == "lost":
      table.recover(engine)
      oracle.state[engine] = "open"
      oracle.version[engine] = max(oracle.version)
    elif action == "drain" and state == "open":
      table.drain(engine)
      oracle.state[engine] = "draining"
    elif action == "update" and state == "draining":
      assert table.drained(engine) == (not oracle.held(engine))
      if table.drained(engine):
        table.update(engine)
        oracle.state[engine] = "updating"
    elif action == "reopen" and state != "lost":
      table.reopen(engine)
      oracle.state[engine] = "open"
      if state == "updating":
        behind = min(oracle.version) < oracle.version[engine]
        oracle.version[engine] = max(oracle.version) + (not behind)

  for _ in range(3000):
    step()
    bound = {name: at for name, at in oracle.where.items() if at is not None}
    assert bindings(table) == bound
    assert len(table._homes) <= 5
  for request in oracle.requests:
    table.answered(request)
  for name in names:
    table.end(name)
  assert table.load == [0] * len(infos)
  # Enough of everything has happened for this to mean something.
  assert min(table.counts.moved, table.counts.fallbacks) > 5
