"""A small multi-turn task whose every path, return and gradient is known.

Three turns of one or two tokens. In most states a token ends the turn, and then
the environment draws the next state or ends the episode; `_CHANCES` has both.

  turn 0: state 0; tokens 1, 2 go on to state 1     the environment: 2, 3 or end
  turn 1: state 2 or 3; token 2 goes on to state 4  the environment: 5, 6 or end
  turn 2: state 5 or 6                                                       end

The policy is a softmax over one row of logits a state, so the probability of a
path is a product of numbers in tables, an expectation is a sum over 481 paths,
and gradients of both follow by the chain rule, in float64. Rewards are given
to turns; a part of the grade depends on the whole path.

Versions: `TABLES[n]` is the policy n optimizer steps before the trained one,
`TABLES[0]`. The policy that sampled a token depends on its place: `lags` are
versions by kind of trajectory and place, so [[1] * 5] is one old policy and
`MIXED` has versions that change in the middle of trajectories.

Letters: N trajectories, P paths, T places of tokens, K turns, S states, A
tokens to choose from, M kinds of trajectories by their versions.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int

STATES, CHOICES, PLACES, TURNS = 7, 3, 5, 3
TURN = np.array([0, 0, 1, 1, 1, 2, 2])
END = STATES

_STEP = 0.16
_ASCENT = 0.5


class Paths(NamedTuple):
  """Every path through the task; 0 where nothing was sampled."""

  states: Int[np.ndarray, "P T"]
  tokens: Int[np.ndarray, "P T"]
  sampled: Bool[np.ndarray, "P T"]
  chances: Float64[np.ndarray, " P"]  # Of all that the environment drew.
  turn_rewards: Float64[np.ndarray, "P K"]
  rewards: Float64[np.ndarray, " P"]  # The grade: of turns, and of the whole.


def _chances() -> Float64[np.ndarray, "S A S+1"]:
  """Returns the distribution of the states after a token."""
  chances = np.zeros((STATES, CHOICES, STATES + 1))
  chances[0, 1:, 1] = 1.0  # The turn goes on.
  chances[2:4, 2, 4] = 1.0
  after_turn_0 = [(0, 0), (1, 0), (1, 1), (1, 2)]
  odds = [(0.5, 0.3, 0.2), (0.2, 0.7, 0.1), (0.6, 0.1, 0.3), (0.4, 0.6, 0.0)]
  for (state, token), odd in zip(after_turn_0, odds, strict=True):
    chances[state, token, [2, 3, END]] = odd
  after_turn_1 = [(2, 0), (2, 1), (3, 0), (3, 1), (4, 0), (4, 1), (4, 2)]
  odds = [
    (0.3, 0.6, 0.1),
    (0.5, 0.1, 0.4),
    (0.8, 0.1, 0.1),
    (0.2, 0.5, 0.3),
    (0.4, 0.4, 0.2),
    (0.1, 0.9, 0.0),
    (0.6, 0.2, 0.2),
  ]
  for (state, token), odd in zip(after_turn_1, odds, strict=True):
    chances[state, token, [5, 6, END]] = odd
  chances[5:7, :, END] = 1.0
  return chances


_CHANCES = _chances()
# Of a token in a state, given to the state's turn.
_REWARDS = np.array(
  [
    [0.0, 0.5, 0.0],
    [0.0, 0.25, 0.5],
    [0.5, 0.0, 0.0],
    [0.0, 0.0, 0.75],
    [0.25, 0.5, 0.0],
    [1.0, 0.0, 0.5],
    [0.0, 1.5, 0.0],
  ]
)


def _ways(state: int) -> Iterator[list[tuple[int, int, int]]]:
  """Yields every path from a state, as (state, token, next state)."""
  for token, then in np.argwhere(_CHANCES[state] > 0).tolist():
    if then == END:
      yield [(state, token, then)]
    else:
      yield from ([(state, token, then), *rest] for rest in _ways(then))


def _grade(way: list[tuple[int, int, int]]) -> float:
  """Returns the grader's part of the reward, added at the end."""
  tokens = [token for _, token, _ in way]
  agrees = 1.0 if tokens[0] == tokens[-1] and len(way) > 1 else 0.0
  return agrees - 0.5 * (TURN[way[-1][0]] == 0)


@functools.cache
def paths() -> Paths:
  """Returns all paths, in the order of `_codes`."""
  ways = sorted(_ways(0), key=_code)
  found = Paths(
    states=np.zeros((len(ways), PLACES), int),
    tokens=np.zeros((len(ways), PLACES), int),
    sampled=np.zeros((len(ways), PLACES), bool),
    chances=np.ones(len(ways)),
    turn_rewards=np.zeros((len(ways), TURNS)),
    rewards=np.array([_grade(way) for way in ways]),
  )
  for path, way in enumerate(ways):
    for place, (state, token, then) in enumerate(way):
      found.states[path, place] = state
      found.tokens[path, place] = token
      found.sampled[path, place] = True
      found.chances[path] *= _CHANCES[state, token, then]
      found.turn_rewards[path, TURN[state]] += _REWARDS[state, token]
  return found._replace(rewards=found.rewards + found.turn_rewards.sum(1))


def _code(way: list[tuple[int, int, int]]) -> int:
  """Returns a number that no other path has."""
  code = 0
  for place in range(PLACES):
    code *= CHOICES * (STATES + 1) + 1
    if place < len(way):
      _, token, then = way[place]
      code += 1 + token * (STATES + 1) + then
  return code


@functools.cache
def _codes() -> Int[np.ndarray, " P"]:
  return np.array(sorted(map(_code, _ways(0))))


def log_policy(table: Float64[np.ndarray, "*n S A"]) -> np.ndarray:
  """Returns log-probabilities of tokens in states, in nats."""
  top = table - table.max(-1, keepdims=True)
  return top - np.log(np.exp(top).sum(-1, keepdims=True))


def logprobs(
  lags: Int[np.ndarray, "M T"],
) -> Float64[np.ndarray, "M P T"]:
  """Returns the log-probability of every token of every path; 0 in padding."""
  every = paths()
  policies = log_policy(TABLES)[lags]  # M T S A.
  places = np.arange(PLACES)
  found = policies[:, places, every.states, every.tokens]
  return np.where(every.sampled, found, 0.0)


def probabilities(
  lags: Int[np.ndarray, "M T"],
) -> Float64[np.ndarray, "M P"]:
  """Returns the probability of every path, by kind."""
  return paths().chances * np.exp(logprobs(lags).sum(-1))


def play(
  random: np.random.Generator, lags: Int[np.ndarray, "M T"], number: int
) -> Int[np.ndarray, " N"]:
  """Returns the paths of so many trajectories, played token by token.

  Trajectory i is of kind i % M.
  """
  policies = np.exp(log_policy(TABLES))
  kinds = np.arange(number) % len(lags)
  state = np.zeros(number, int)
  code = np.zeros(number, int)
  for place in range(PLACES):
    on = state != END
    here = np.where(on, state, 0)
    token = _draw(random, policies[lags[kinds, place], here])
    then = _draw(random, _CHANCES[here, token])
    code = code * (CHOICES * (STATES + 1) + 1)
    code += np.where(on, 1 + token * (STATES + 1) + then, 0)
    state = np.where(on, then, END)
  return np.searchsorted(_codes(), code)


def _draw(
  random: np.random.Generator, chances: Float64[np.ndarray, "N n"]
) -> Int[np.ndarray, " N"]:
  ends = chances.cumsum(-1)
  # Below the last end: a sum may stay short of 1, an impossible end be last.
  level = random.random((len(chances), 1)) * ends[:, -1:]
  return (ends <= level).sum(-1)


def along(
  table: Float64[np.ndarray, "S A"],
  played: Int[np.ndarray, " N"],
  weights: Float64[np.ndarray, "N T"],
) -> Float64[np.ndarray, "N S A"]:
  """Returns each trajectory's sum of weight x gradient of a log-probability.

  Args:
    played: the trajectories' paths.
    weights: of their tokens; what stands in padding does not matter.
  """
  every = paths()
  row, place = np.nonzero(every.sampled[played])
  weight = weights[row, place]
  state, token = (
    every.states[played[row], place],
    every.tokens[played[row], place],
  )
  shape = (len(played), STATES, CHOICES)
  chosen = np.bincount(
    (row * STATES + state) * CHOICES + token, weight, np.prod(shape)
  ).reshape(shape)
  # The derivative of log softmax: chosen minus probability.
  return chosen - chosen.sum(-1, keepdims=True) * np.exp(log_policy(table))


def gradient(
  table: Float64[np.ndarray, "S A"], values: Float64[np.ndarray, " P"]
) -> Float64[np.ndarray, "S A"]:
  """Returns sum over paths of value x gradient of the path's probability.

  That is the gradient of the expected value if values do not depend on the
  table: of the expected return for `paths().rewards`.
  """
  weights = np.repeat((chances_under(table) * values)[:, None], PLACES, 1)
  return along(table, np.arange(len(values)), weights).sum(0)


def chances_under(
  table: Float64[np.ndarray, "S A"],
) -> Float64[np.ndarray, " P"]:
  """Returns the probability of every path under one policy."""
  every = paths()
  log = log_policy(table)[every.states, every.tokens]
  return every.chances * np.exp(np.where(every.sampled, log, 0.0).sum(-1))


def values_by_history(
  table: Float64[np.ndarray, "S A"],
) -> Float64[np.ndarray, "P T"]:
  """Returns the values of a perfect critic before each token; 0 in padding.

  It is the mean of the rewards still to come, given all that was so far. The
  reward of a turn comes with its last token, the rest of the grade at the end.
  """
  every = paths()
  chances = chances_under(table)
  found = np.zeros(every.states.shape)
  for place in range(PLACES):
    seen = np.hstack([every.states[:, : place + 1], every.tokens[:, :place]])
    turns = TURN[every.states[:, place], None] > np.arange(TURNS)
    to_come = every.rewards - (every.turn_rewards * turns).sum(-1)
    seen[~every.sampled[:, place]] = -1
    _, history = np.unique(seen, axis=0, return_inverse=True)
    total = np.bincount(history, chances * to_come) / np.bincount(
      history, chances
    )
    found[:, place] = np.where(every.sampled[:, place], total[history], 0.0)
  return found


def means_of_best(
  table: Float64[np.ndarray, "S A"], k: int
) -> Float64[np.ndarray, " P"]:
  """Returns the mean of the best reward of a path and k - 1 > 0 others."""
  rewards = paths().rewards
  levels, where = np.unique(rewards, return_inverse=True)
  below = np.bincount(where, chances_under(table)).cumsum() ** (k - 1)
  return np.maximum(rewards[:, None], levels) @ np.diff(below, prepend=0.0)


def _tables() -> Float64[np.ndarray, "5 S A"]:
  """Returns the policies of five optimizer steps, the last one first.

  A step goes up the gradient and, as that of any finite batch, aside.
  """
  random = np.random.default_rng(2026)
  versions = [0.6 * random.standard_normal((STATES, CHOICES))]
  for _ in range(4):
    ascent = _ASCENT * gradient(versions[0], paths().rewards)
    aside = _STEP * random.standard_normal((STATES, CHOICES))
    versions.insert(0, versions[0] + ascent + aside)
  return np.stack(versions)


TABLES = _tables()
MIXED = np.array(
  [
    [4, 4, 3, 2, 1],
    [3, 1, 1, 1, 0],
    [4, 2, 2, 1, 1],
    [2, 2, 2, 2, 2],
  ]
)


def old(lag: int) -> Int[np.ndarray, "1 T"]:
  """Returns the `lags` of trajectories that one version sampled."""
  return np.full((1, PLACES), lag)
