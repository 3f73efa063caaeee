"""Games of textarena for two: the agent against itself, a program or a server.

  task -> seat 0 --answer--> game --what it says--> seat 1 --answer--> game ...
                              |
              done: 1 for the winner, 0.5 each for a draw

Against itself two members of a group sit at one table. Each has a trajectory of
its own, from what its seat was told and what it answered, and its own reward.
"""

import asyncio
import collections
import contextlib
import dataclasses
import random
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from envs import base, extras, threads
from envs.offload import http
from envs.suites import textarena


@runtime_checkable
class Opponent(Protocol):
  """A player that is not trained; a frozen dataclass."""

  def __call__(self, seed: int) -> "_Player":
    """Returns a player of one game."""
    ...


class _Player(Protocol):
  """An opponent in one game."""

  async def answer(self, said: str, moves: Sequence[str]) -> str:
    """Returns an answer to what the game has said; `moves` are permitted."""
    ...

  async def close(self) -> None:
    """Releases its resources."""
    ...


@dataclasses.dataclass(frozen=True)
class RandomPlayer:
  """Makes any move that is permitted, the same ones for the same seed."""

  def __call__(self, seed: int) -> "_Random":
    """Returns a player of one game."""
    return _Random(seed)


class _Random:
  def __init__(self, seed: int):
    self._draw = random.Random(seed)

  async def answer(self, said: str, moves: Sequence[str]) -> str:
    return self._draw.choice(moves)

  async def close(self) -> None:
    pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedPlayer:
  """A model behind an OpenAI endpoint, such as a frozen one of `launch.serve`.

  A server that fails is a fault of that episode, which names its URL. The
  environment variable OPENAI_API_KEY is sent if it is set.

  Attributes:
    url: with the path of the API, such as http://localhost:8000/v1.
    reply_s: deadline of one answer.
  """

  url: str
  model: str
  max_tokens: int = 256
  temperature: float = 1.0
  reply_s: float = 30.0

  def __post_init__(self) -> None:
    if not self.url.startswith(("http://", "https://")):
      raise ValueError(f"url={self.url!r} must begin with http:// or https://")
    extras.require("httpx2", "rewards", "a served opponent")

  def __call__(self, seed: int) -> "_Served":
    """Returns a player of one game."""
    return _Served(self)


class _Served:
  def __init__(self, settings: ServedPlayer):
    self._settings = settings
    self._messages: list[dict[str, str]] = []
    self._connections = http.Connections(settings.reply_s)

  async def answer(self, said: str, moves: Sequence[str]) -> str:
    settings = self._settings
    self._messages.append({"role": "user", "content": said})
    body = {
      "model": settings.model,
      "messages": self._messages,
      "max_tokens": settings.max_tokens,
      "temperature": settings.temperature,
    }
    text = await self._connections.complete(
      settings.url, body, "OPENAI_API_KEY"
    )
    self._messages.append({"role": "assistant", "content": text})
    return text

  async def close(self) -> None:
    await self._connections.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoPlayer:
  """A game of textarena (MIT) for two, in the game's own words.

  An answer has its move in brackets, as the first message explains; the second
  invalid one in a row loses. The reward is 1 for a win, 0.5 for a draw and 0
  otherwise, so those of both sides sum to 1. Metrics: `draw`, `invalid`.

  Without an opponent members of a group play each other, and both sides are
  trained. Then `rollout.group_size` must be even, members must not be redundant
  and play in one process, and `rollout.step_s` must leave time for an answer of
  the other side. A game that one side leaves, or loses before the other has
  moved, is a fault of the side that is left: it has nothing to learn from.

  Evaluation is always against an opponent, as a policy wins half of its games
  against itself. Its seeds are not those of training; what they decide is the
  seat, the cards if there are any, and the random opponent's moves.

  Attributes:
    game: id in textarena, such as KuhnPoker-v0, of a family in GAMES.
    opponent: None for self-play.
    eval_opponent: of evaluation.
    partner_s: deadline for the other member to sit down.
  """

  game: str = "TicTacToe-v0"
  opponent: Opponent | None = None
  eval_opponent: Opponent = RandomPlayer()
  partner_s: float = 30.0

  def __post_init__(self) -> None:
    if not self.partner_s > 0:
      raise ValueError(f"partner_s={self.partner_s} must be above 0")
    textarena.check_game(self.game, GAMES)

  @property
  def name(self) -> str:
    """Short name: the first part of every task id."""
    return self.game.lower()

  @property
  def members_together(self) -> int:
    """Members of a group that play each other."""
    return 1 if self.opponent is not None else 2

  def task(self, index: int, split: base.Split) -> base.Task:
    """Returns a task; seeds are even in training and odd in evaluation."""
    seed = 2 * index + (split == "eval")
    return base.Task(f"{self.name}/{split}/{index}", index, split, seed)

  def __call__(self, task: base.Task) -> "_Seat":
    """Returns a fresh seat; the game is dealt in its `start`."""
    return _Seat(self, task)


def _board(game: textarena.Game) -> Sequence[str]:
  cells = [cell for row in game.state.game_state["board"] for cell in row]
  return [f"[{i}]" for i, cell in enumerate(cells) if not cell]


def _columns(game: textarena.Game) -> Sequence[str]:
  top = game.state.game_state["board"][0]
  return [f"[col {i}]" for i, cell in enumerate(top) if cell == "."]


def _piles(game: textarena.Game) -> Sequence[str]:
  piles = game.state.game_state["piles"]
  return [f"[{i} {n + 1}]" for i, pile in enumerate(piles) for n in range(pile)]


def _calls(game: textarena.Game) -> Sequence[str]:
  return [f"[{w}]" for w in game.state.game_state["current_legal_action_tree"]]


GAMES: Mapping[str, Callable[[textarena.Game], Sequence[str]]] = {
  "ConnectFour": _columns,
  "KuhnPoker": _calls,
  "Nim": _piles,
  "TicTacToe": _board,
}
"""Families of games for two, each with a list of the moves that it permits."""


class _Table:
  """One game, and whose turn it is; on one event loop."""

  def __init__(self) -> None:
    self.game: Any = None
    self.over = False
    self._left = False
    self._changed = asyncio.Event()

  @property
  def current(self) -> int:
    """The seat whose turn it is."""
    return self.game.state.current_player_id

  async def deal(self, game: str, seed: int) -> None:
    self.game = await self._do(textarena.Game, game, 2, seed)

  async def play(self, text: str) -> None:
    self.over = await self._do(self.game.play, text)

  async def dealt(self) -> None:
    """Waits until the other member has sat down and dealt."""
    await self._until(lambda: self.game is not None)

  async def turn(self, seat: int) -> None:
    """Waits for the turn of a seat, or the end of the game."""
    await self._until(lambda: self.over or self.current == seat)

  def leave(self) -> None:
    self._left = True
    self._tell()

  async def _until(self, is_so: Callable[[], bool]) -> None:
    while not is_so():
      if self._left:
        raise RuntimeError("the other member has left the game")
      await self._changed.wait()

  async def _do(self, call: Callable[..., Any], *arguments: Any) -> Any:
    try:
      return await threads.call(call, *arguments)
    except BaseException:
      self._left = True  # The game may be broken: nobody waits for it.
      raise
    finally:
      self._tell()

  def _tell(self) -> None:
    self._changed.set()
    self._changed = asyncio.Event()


class _Tables(collections.deque[_Table]):
  """Tables of one task that have a free seat."""


# Members of a task sit down on the event loop that plays them.
_tables: weakref.WeakKeyDictionary[
  asyncio.AbstractEventLoop,
  weakref.WeakValueDictionary[tuple[TwoPlayer, base.Task], _Tables],
] = weakref.WeakKeyDictionary()


class _Seat:
  """One side of a game."""

  def __init__(self, source: TwoPlayer, task: base.Task):
    self._source = source
    self._task = task
    self._seat = 0
    self._table = _Table()
    self._player: _Player | None = None
    self._free = _Tables()

  async def start(self) -> Sequence[base.Message]:
    source, task = self._source, self._task
    opponent = (
      source.opponent if task.split == "train" else source.eval_opponent
    )
    if opponent is not None:
      self._seat = random.Random(task.seed).randrange(2)
      self._player = opponent(task.seed)
      await self._table.deal(source.game, task.seed)
    else:
      await self._sit_down()
    await self._wait()
    if self._table.over:
      raise RuntimeError("the other side lost before this one had moved")
    return [base.Message("user", self._table.game.said(self._seat))]

  async def step(self, answer: base.Message) -> base.Step:
    table, seat = self._table, self._seat
    await table.play(answer.content)
    info = table.game.state.game_info[seat]
    again = not table.over and table.current == seat
    invalid = info["invalid_move"] or (again and _is_refused(table.game, seat))
    metrics = {"invalid": float(invalid)}
    await self._wait()
    if not table.over:
      said = base.Message("user", table.game.said(seat))
      return base.Step([said], 0.0, False, metrics)
    # textarena's rewards are 1, 0 and -1.
    reward = (table.game.state.rewards[seat] + 1) / 2
    metrics["draw"] = float(reward == 0.5)
    reason = base.Message("user", str(info["reason"]))
    return base.Step([reason], reward, True, metrics)

  async def close(self) -> None:
    with contextlib.suppress(ValueError):
      self._free.remove(self._table)
    self._table.leave()
    if self._player is not None:
      await self._player.close()

  async def _sit_down(self) -> None:
    """Takes the second seat of a table, or the first of a new one."""
    source, task = self._source, self._task
    loop = asyncio.get_running_loop()
    tables = _tables.setdefault(loop, weakref.WeakValueDictionary())
    # A weak value: it lives as long as the members of the task do.
    self._free = tables.setdefault((source, task), _Tables())
    if self._free:
      self._table, self._seat = self._free.popleft(), 1
      return await self._table.deal(source.game, task.seed)
    self._free.append(self._table)
    try:
      async with asyncio.timeout(source.partner_s):
        await self._table.dealt()
    except TimeoutError as error:
      raise TimeoutError(
        f"nobody sat down to play against within {source.partner_s:g} s: "
        "self-play needs members of a group in pairs and in one process; raise "
        "partner_s if they begin late"
      ) from error

  async def _wait(self) -> None:
    """Lets the other side play until it is the turn of this one."""
    table, seat, player = self._table, self._seat, self._player
    if player is None:
      return await table.turn(seat)
    while not table.over and table.current != seat:
      moves = GAMES[self._source.game.partition("-v0")[0]](table.game)
      said = table.game.said(1 - seat)
      await table.play(await player.answer(said, moves))


def _is_refused(game: textarena.Game, seat: int) -> bool:
  """Returns whether a player must answer again, after a refused move."""
  said = game.state.observations[seat]
  return any(kind.name == "GAME_ADMIN" for _, _, kind in said)
