"""Episodes of given lengths, whose ids tell where each came from."""

import numpy as np

from rl.data import trajectory


def episode(turns, first_id=0, *, group=0, prompt=None, experts=None):
  """Returns an episode of (context, sampled) lengths.

  Args:
    first_id: ids count up from here.
    prompt: ids in place of the first context.
    experts: shape (S, k) of those that a token took: id, id + 1, ...
  """
  records, at = [], first_id
  for number, (context, sampled) in enumerate(turns):
    ids = np.arange(at, at + context + sampled, dtype=np.int32)
    at += len(ids)
    if prompt is not None and not number:
      ids[:context] = prompt
    own = ids[context:]
    chosen = None
    if experts is not None:
      steps = np.arange(np.prod(experts), dtype=np.int32).reshape(experts)
      chosen = ids[:, None, None] + steps
    records.append(
      trajectory.Turn(
        context=ids[:context],
        tokens=own,
        logprobs=(-own / 7).astype(np.float32),
        versions=own // 10,
        stop="stop",
        experts=chosen,
      )
    )
  return trajectory.Trajectory(
    task_id="game/train/0",
    group_id=group,
    index=0,
    turns=records,
    status=trajectory.Status.COMPLETED,
    reward=0.0,
  )


def random_groups(draws):
  """Returns 6 groups of 5 episodes of 1 to 4 turns, none longer than 24 ids.

  Members share a prompt of 1 to 8 ids, but every fifth has its own; the last
  id of an episode belongs to no other.
  """
  episodes, at = [], 10_000
  for group in range(6):
    width = int(draws.integers(1, 9))
    for _ in range(5):
      prompt = np.arange(width) + 100 * group
      prompt[-1] += 50 * (draws.random() < 0.2)
      turns = draws.integers(1, 3, size=(draws.integers(1, 5), 2))
      turns[0, 0] = width
      episodes.append(episode(turns.tolist(), at, group=group, prompt=prompt))
      at += 100
  return episodes
