"""Tests of preferences: declared ones hold, learned ones find the best pool."""

import itertools
import math

import numpy as np
import pytest

from rl.engine import contract
from rl.pools import affinity, placement
from rl.settings import overrides

COMPUTE = placement.EngineInfo("fast", "compute")
BANDWIDTH = placement.EngineInfo("wide", "bandwidth")


def sample(seconds, ids=1.0):
  return affinity.Sample(0.0, 0.0, seconds * ids, ids)


@pytest.mark.parametrize(
  ("infos", "routing", "preferred"),
  [
    ([COMPUTE, BANDWIDTH], {"prefer": {"a": "wide"}}, {1}),
    ([COMPUTE, BANDWIDTH], {"prefer": {"a": "compute"}}, {0}),
    ([COMPUTE, BANDWIDTH], {"prefer": {"a": "any"}, "default": "wide"}, None),
    ([COMPUTE, BANDWIDTH], {"prefer": {"b": "wide"}}, None),
    ([COMPUTE, BANDWIDTH], {"default": "wide"}, {1}),
    ([COMPUTE, BANDWIDTH, COMPUTE], {"default": "fast"}, {0, 2}),
    # Pools of one kind: kinds say nothing, names still do.
    ([COMPUTE, COMPUTE], {"prefer": {"a": "compute"}}, None),
    ([COMPUTE, COMPUTE], {"prefer": {"a": "bandwidth"}}, None),
    (
      [placement.EngineInfo("x"), placement.EngineInfo("y")],
      {"prefer": {"a": "y"}},
      {1},
    ),
  ],
)
def test_a_domain_prefers_the_engines_of_a_pool_or_kind(
  infos, routing, preferred
):
  chooser = affinity.Affinity(infos, affinity.Routing(**routing))
  assert chooser.preferred("a") == preferred


@pytest.mark.parametrize(
  ("routing", "message"),
  [
    ({"prefer": {"a": "wdie"}}, r"prefer\.a=wdie names neither .*mean wide\?$"),
    ({"default": "far"}, r"default=far names neither a pool nor a kind; there"),
    ({"prefer": {"a": "compute"}}, r"are wide \(bandwidth\), rest \(any\)"),
  ],
)
def test_a_pool_that_does_not_exist_is_refused(routing, message):
  with pytest.raises(ValueError, match=message):
    affinity.Routing(**routing).validate_pools(
      {"wide": "bandwidth", "rest": "any"}
    )


def test_a_domain_that_does_not_exist_is_refused():
  routing = affinity.Routing(prefer={"maths": "compute"})
  routing.validate_domains(["maths", "code"])
  with pytest.raises(
    ValueError, match="prefer=maths is unknown; use code, math; did you"
  ):
    routing.validate_domains(["math", "code"])


@pytest.mark.parametrize(
  ("routing", "message"),
  [
    ({"explore_every": -1}, "explore_every=-1 must be at least 0"),
    ({"overload": 0.5}, r"overload=0\.5 must be at least 1"),
    ({"overload": math.nan}, "overload=nan must be at least 1"),
    (
      {"learn": True, "default": "wide"},
      "wide with learn=true: nothing",
    ),
  ],
)
def test_a_setting_that_cannot_work_is_refused(routing, message):
  with pytest.raises(ValueError, match=message):
    affinity.Routing(**routing).validate()


def test_preferences_are_set_from_the_command_line():
  routing = overrides.override(
    affinity.Routing(), "prefer", '{"math": "wide", "frozen_lake": "compute"}'
  )
  routing = overrides.override(routing, "overload", "4")
  assert routing.prefer == {"math": "wide", "frozen_lake": "compute"}
  assert routing.overload == 4.0
  assert overrides.from_json(overrides.to_json(routing)) == routing


def test_a_preferred_pool_is_left_when_it_has_too_many_sessions():
  routing = affinity.Routing(prefer={"a": "wide"}, overload=3.0)
  chooser = affinity.Affinity([COMPUTE, BANDWIDTH, BANDWIDTH], routing)
  # The emptiest wide engine would have 3 sessions, the other pool 1.
  assert chooser.choose("a", [0, 1, 2], [0, 2, 9]) == (1, "")
  # 4 are more than 3 * 1 ...
  assert chooser.choose("a", [0, 1, 2], [0, 3, 9]) == (0, "wide")
  # ... but not more than 3 * 2, ...
  assert chooser.choose("a", [0, 1, 2], [1, 3, 9]) == (1, "")
  # ... and where nothing else could be had they go there all the same.
  assert chooser.choose("a", [1, 2], [0, 3, 9]) == (1, "")
  never = affinity.Affinity(
    [COMPUTE, BANDWIDTH], affinity.Routing(prefer={"a": "wide"})
  )
  assert never.choose("a", [0, 1], [0, 10**6]) == (1, "")


def test_an_estimate_is_of_the_ids_of_the_domain_at_the_speed_of_the_pool():
  estimates = affinity.Estimates()
  # Equal weights but for what is forgotten: one session each.
  estimates.end("a", "fast", affinity.Sample(2.0, 100.0, 3.0, 10.0))
  assert estimates.of("a", "fast") == pytest.approx(5.0)
  assert estimates.of("a", "wide") is None
  estimates.end("a", "wide", affinity.Sample(8.0, 200.0, 2.0, 20.0))
  # The first one counts k = exp(-1/32) now.
  k = math.exp(-1 / 32)
  encoded, sampled = (100 * k + 200) / (k + 1), (10 * k + 20) / (k + 1)
  for pool, encoding, sampling in (("fast", 0.02, 0.3), ("wide", 0.04, 0.1)):
    expected = encoded * encoding + sampled * sampling
    assert estimates.of("a", pool) == pytest.approx(expected)
    assert estimates.seconds["a", pool] == pytest.approx(expected)


def test_a_session_that_sampled_nothing_teaches_nothing():
  estimates = affinity.Estimates()
  estimates.end("a", "fast", affinity.Sample(1.0, 5.0, 0.0, 0.0))
  assert estimates.seconds == {}


def test_every_pool_is_tried_at_first_and_then_now_and_again():
  estimates = affinity.Estimates()
  tried = []
  for _ in range(10):
    pool = estimates.due("a", ["x", "y", "z"], every=5)
    tried.append(pool)
    estimates.begin("a", pool or "z")
  # Three at first; the fifth and tenth go to what was not used for longest.
  assert tried == ["x", "y", "z", None, "x", None, None, None, None, "y"]
  assert estimates.due("a", ["x", "y", "z"], every=0) is None


def play(chooser, domains, seconds, count, start=0):
  """Returns the engines of sessions that are played one at a time."""
  infos = (COMPUTE, BANDWIDTH)
  chosen = {name: [] for name in domains}
  for _, name in zip(range(count), itertools.cycle(domains), strict=False):
    choice = chooser.choose(name, [0, 1], [0, 0])
    pool = infos[choice.engine].pool
    chooser.estimates.begin(name, pool)
    chooser.estimates.end(name, pool, sample(seconds[name, pool], 7.0))
    chosen[name].append(choice.engine)
    assert choice.missed == ""
  return chosen


def test_what_is_learned_finds_the_better_pool_and_notices_a_change():
  routing = affinity.Routing(learn=True, explore_every=16)
  chooser = affinity.Affinity([COMPUTE, BANDWIDTH], routing)
  seconds = {
    ("lake", "fast"): 1.0,
    ("lake", "wide"): 2.0,
    ("math", "fast"): 2.0,
    ("math", "wide"): 1.5,
  }
  chosen = play(chooser, ("lake", "math"), seconds, 64)
  # One try of each pool; then all but each 16th are where it is cheaper, and
  # that one, first the wide pool for either domain, ...
  assert chosen["lake"][2:15] == [0] * 13
  assert chosen["math"][2:15] == [1] * 13
  assert sum(chosen["lake"]) == 3
  assert sum(chosen["math"]) == 32 - 3
  # ... finds out when the others change places: all but the explored ones of
  # the last 64 of each domain.
  swapped = {
    (name, pool): seconds[name, {"fast": "wide", "wide": "fast"}[pool]]
    for name, pool in seconds
  }
  chosen = play(chooser, ("lake", "math"), swapped, 1000)
  assert sum(chosen["lake"][-64:]) == 60
  assert sum(chosen["math"][-64:]) == 4


def test_what_is_learned_is_weighed_by_load_and_not_by_what_is_paid_anyway():
  routing = affinity.Routing(learn=True, explore_every=0)
  for info, load, engine in (
    (COMPUTE, [0, 0], 0),
    (COMPUTE, [1, 0], 1),  # 1 s * 2 against 2 s * 1: the emptier of equals
    (COMPUTE, [2, 0], 1),  # 1 s * 3 against 2 s * 1
    (COMPUTE, [4, 2], 0),  # 1 s * 5 against 2 s * 3
  ):
    chooser = affinity.Affinity([info, BANDWIDTH], routing)
    for pool, seconds in (("fast", 1.0), ("wide", 2.0)):
      chooser.estimates.begin("a", pool)
      chooser.estimates.end("a", pool, sample(seconds))
    assert chooser.choose("a", [0, 1], load).engine == engine


def test_until_all_have_answered_sessions_go_where_the_fewest_are():
  routing = affinity.Routing(learn=True)
  chooser = affinity.Affinity([COMPUTE, BANDWIDTH, BANDWIDTH], routing)
  load = [0, 0, 0]
  for _ in range(9):
    engine = chooser.choose("a", [0, 1, 2], load).engine
    chooser.estimates.begin("a", ("fast", "wide", "wide")[engine])
    load[engine] += 1
  assert load == [3, 3, 3]


def test_sessions_of_which_nothing_is_known_are_not_learned_from():
  routing = affinity.Routing(learn=True)
  chooser = affinity.Affinity([COMPUTE, BANDWIDTH], routing)
  assert chooser.choose("", [0, 1], [1, 0]) == (1, "")


def test_the_wait_for_a_slot_is_not_taken_for_prefill():
  request = contract.DecodeRequest(
    request_id="a/0", session="a", tokens=np.zeros(10, np.int32), max_tokens=9
  )
  answer = contract.Completion(
    tokens=np.zeros(2, np.int32),
    logprobs=np.zeros(2, np.float32),
    versions=np.zeros(2, np.int32),
    stop="stop",
    cached_tokens=4,
    decode_s=8.0,
    first_token_s=5.0,
    queue_s=3.5,
  )
  # Of 5 s before the first token 3.5 were the queue's.
  assert affinity.sample(request, answer) == (1.5, 6.0, 3.0, 2.0)
