"""Recorded conversations -> trajectories, in the ids of a run's chat.

  messages --chat--> context | answer | context | answer --> Trajectory

Answers count as sampled, and so they alone are trained.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from envs import base
from models.chat import template
from rl.data import trajectory
from rl.rollout import episode

TooLong = Literal["error", "drop"]
_Turns = Sequence[tuple[Int32[np.ndarray, " P"], Int32[np.ndarray, " T"]]]


class UnusableRow(ValueError):
  """A recorded conversation cannot be trained; the message names its place."""


@runtime_checkable
class Transcribes(Protocol):
  """A chat whose template writes answers, as `models.chat.hf_chat.HfChat`."""

  def answers(
    self,
    messages: Sequence[base.Message],
    tools: Sequence[Mapping[str, Any]] = (),
    first: int = 0,
  ) -> _Turns:
    """Returns the ids of each answer after those of the context before it."""
    ...


class Examples(NamedTuple):
  """Encoded examples: a trajectory each, or a preferred and a rejected one.

  Attributes:
    dropped: how many were too long.
  """

  examples: Sequence[tuple[trajectory.Trajectory, ...]]
  dropped: int


def load(
  source: base.Recorded,
  chat: episode.Chat,
  split: base.Split,
  most: int | None = None,
  *,
  length: int,
  max_length: int,
  too_long: TooLong = "error",
) -> Examples:
  """Returns the examples of a split, in order.

  Args:
    most: how many are enough.
    length: tokens of a packed row, in which an example must fit.
    max_length: those of the longest conversation that the model takes.

  Raises:
    UnusableRow: a row cannot be read or encoded, or is too long; or all are, or
      there is none.
  """
  found: list[tuple[trajectory.Trajectory, ...]] = []
  dropped, place, fault = 0, "", ""
  for recordings in _examples(source, split):
    if len(found) == most:
      break
    encoded = tuple(
      encode(chat, recording, len(found), index)
      for index, recording in enumerate(recordings)
    )
    sizes = [len(one.ids) for one in encoded]
    place, fault = recordings[0].place, ""
    if max(sizes) > max_length:
      fault = (
        f"its {max(sizes)} tokens do not fit model.max_length={max_length}"
      )
    elif sum(sizes) > length:
      fault = f"its {sum(sizes)} tokens do not fit batch.length={length}"
    if not fault:
      found.append(encoded)
    elif too_long == "drop":
      dropped += 1
    else:
      raise UnusableRow(
        f"{place}: {fault}; raise it, or leave such rows out with "
        "warm_start.too_long=drop"
      )
  if not (found or dropped):
    out = ", or use warm_start.held_out=0" if split == "eval" else ""
    raise UnusableRow(f"there are no examples for {split}; add some{out}")
  if not found:
    raise UnusableRow(
      f"none of {dropped} examples for {split} fits: {place}: {fault}; raise it"
    )
  return Examples(found, dropped)


def _examples(
  source: base.Recorded, split: base.Split
) -> Iterator[tuple[base.Recording, ...]]:
  try:
    yield from source.examples(split)
  except ValueError as error:  # Most rows that a function gives are new here.
    raise UnusableRow(str(error)) from error


def encode(
  chat: episode.Chat, recording: base.Recording, group_id: int, index: int
) -> trajectory.Trajectory:
  """Returns a conversation as if its answers had been sampled.

  Raises:
    UnusableRow: the chat cannot encode it.
  """
  try:
    if isinstance(chat, Transcribes):
      turns = chat.answers(recording.messages, recording.tools, recording.first)
    else:
      turns = list(_turn_by_turn(chat, recording))
  except template.Rewritten as error:
    out = (
      "end the conversation there, or train each answer of chats as an example "
      "of its own, with environment.each_answer=true"
    )
    raise UnusableRow(f"{recording.place}: {error}; {out}") from error
  except ValueError as error:
    raise UnusableRow(f"{recording.place}: {error}") from error
  return trajectory.Trajectory(
    task_id=recording.place,
    group_id=group_id,
    index=index,
    turns=[_turn(context, answer) for context, answer in turns],
    status=trajectory.Status.COMPLETED,
  )


def _turn_by_turn(
  chat: episode.Chat, recording: base.Recording
) -> Iterator[tuple[Int32[np.ndarray, " P"], Int32[np.ndarray, " T"]]]:
  """Yields what an episode would ask for and sample."""
  context: list[Int32[np.ndarray, " P"]] = []
  unseen: list[base.Message] = []
  show = functools.partial(chat.open, tools=recording.tools)
  for number, message in enumerate(recording.messages):
    if message.role != "assistant":
      unseen.append(message)
      continue
    context.append(show(unseen))
    answer = chat.encode_answer(episode.as_text(message))
    if number < recording.first:
      context.append(answer)
    else:
      yield np.concatenate(context), answer
      context = []
    unseen, show = [], chat.append


def _turn(
  context: Int32[np.ndarray, " P"], answer: Int32[np.ndarray, " T"]
) -> trajectory.Turn:
  return trajectory.Turn(
    context=context,
    tokens=answer,
    logprobs=np.zeros(len(answer), np.float32),
    versions=np.zeros(len(answer), np.int32),
    stop="stop",
  )
