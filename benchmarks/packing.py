"""What a group saves by having its prompt once in a row: tokens, rows, time.

  python -m benchmarks.packing [--repeats=5]

Four groups of eight play episodes of one or five turns. Answers and the replies
to them have log-normal lengths. The same episodes are packed twice, each member
with its own prompt and with shared ones, into rows of one length, and trained:
every row is a micro-batch of a small model, and an update ends the step. The
two sides take turns; medians of a step's seconds are compared, and the range of
the speed-up is that of the single turns. The same for the process's CPU
seconds, which on a CPU that others use too say more. Two of the cases save
little: prompts that are short next to the answers, and rows too short for a
second member.
Writes benchmarks/results/packing.json.
"""

import dataclasses
import statistics
from collections.abc import Callable, Sequence

import jax
import numpy as np
from absl import app
from absl import flags as absl_flags

from benchmarks import machine, small_parts
from launch.cli import jax_setup
from models import config as config_lib
from rl.data import batch, trajectory
from rl.pools import placement
from rl.train import learner

_REPEATS = absl_flags.DEFINE_integer("repeats", 5, "Of each side.")

_GROUPS, _GROUP_SIZE, _VOCAB, _SPREAD = 4, 8, 512, 0.6


@dataclasses.dataclass(frozen=True)
class Case:
  """One mix of lengths.

  Attributes:
    prompt: ids of the system prompt, the tools and the task.
    turns: answers of an episode.
    reply, answer: median ids of what the environment and the agent say.
    length: of a row.
  """

  name: str
  prompt: int
  turns: int
  reply: int
  answer: int
  length: int


CASES = (
  Case("prompt 64, 1 turn", 64, 1, 0, 64, 1024),
  Case("prompt 64, 5 turns", 64, 5, 16, 24, 1024),
  Case("prompt 512, 1 turn", 512, 1, 0, 64, 2048),
  Case("prompt 512, 5 turns", 512, 5, 32, 32, 2048),
  Case("prompt 512, 5 turns, short rows", 512, 5, 32, 32, 1024),
  Case("prompt 16, long answers", 16, 1, 0, 256, 1024),
)


def _episodes(case: Case) -> list[trajectory.Trajectory]:
  random = np.random.default_rng(0)

  def ids(count: int) -> np.ndarray:
    return random.integers(_VOCAB, size=count).astype(np.int32)

  def about(median: int) -> int:
    # Within the limits that a run sets to a turn.
    drawn = median * random.lognormal(0, _SPREAD)
    return int(np.clip(drawn, 1, 2 * median))

  def turn(context: np.ndarray) -> trajectory.Turn:
    return small_parts.turn(context, ids(about(case.answer)), -6.0)

  episodes = []
  for group in range(_GROUPS):
    prompt = ids(case.prompt)
    for index in range(_GROUP_SIZE):
      turns = [turn(prompt)]
      turns += [turn(ids(about(case.reply))) for _ in range(case.turns - 1)]
      episodes.append(small_parts.episode(turns, group, index))
  return episodes


def _programs(length: int) -> learner.Learner:
  config = config_lib.tiny(
    vocab_size=_VOCAB,
    num_layers=2,
    d_model=64,
    head_dim=16,
    d_ff=192,
    max_length=length,
  )
  layout, _ = placement.Placement(colocated=True).layouts()
  return small_parts.programs(config, layout)


def _step(
  programs: learner.Learner, packed: list[batch.Batch]
) -> Callable[[], None]:
  """Returns a training step over all rows."""
  state = programs.init(jax.random.key(0))
  placed = [programs.place(row) for row in packed]

  def step() -> None:
    nonlocal state
    total = None
    for row in placed:
      total = programs.accumulate(state.params, total, row)
    assert total is not None  # There is a row.
    state, _ = programs.update(state, total)
    jax.block_until_ready(state)

  return step


def _packed(
  case: Case, episodes: Sequence[trajectory.Trajectory], share: bool
) -> list[batch.Batch]:
  """Returns rows, each a batch; every episode has an advantage of its own."""
  packed = batch.pack(
    episodes, rows=1, length=case.length, version=0, share_prompts=share
  )
  values = small_parts.advantages(episodes, np.random.default_rng(1))
  return batch.with_column(packed, "advantages", values).batches


def measure(case: Case, repeats: int) -> dict[str, str | float]:
  """Returns tokens, rows and step seconds of both sides, and their ratios."""
  episodes = _episodes(case)
  own, shared = (_packed(case, episodes, share) for share in (False, True))
  programs = _programs(case.length)
  steps = [_step(programs, packed) for packed in (own, shared)]
  for step in steps:
    step()  # Compiles.
  seconds = [[machine.timed(step) for step in steps] for _ in range(repeats)]
  wall, cpu = (
    [(before[clock], after[clock]) for before, after in seconds]
    for clock in (0, 1)
  )
  return {
    "case": case.name,
    "row length": case.length,
    "tokens": _tokens(own),
    "tokens shared": _tokens(shared),
    "rows": len(own),
    "rows shared": len(shared),
    **_compared("step", wall),
    **_compared("cpu", cpu),
  }


def _compared(
  name: str, pairs: Sequence[tuple[float, float]]
) -> dict[str, float]:
  before, after = map(statistics.median, zip(*pairs, strict=True))
  ratios = [before / after for before, after in pairs]
  return {
    f"{name} s": before,
    f"{name} s shared": after,
    **machine.spread(f"{name} speed-up", ratios),
  }


def _tokens(packed: list[batch.Batch]) -> int:
  return sum(int((row.segments > 0).sum()) for row in packed)


def main(_: list[str]) -> None:
  """Measures every case, prints the table and keeps it."""
  jax_setup.keep_compiled()
  rows = [measure(case, _REPEATS.value) for case in CASES]
  print(machine.describe())
  machine.show("groups with and without shared prompts", rows)
  machine.keep("packing", rows=rows)


if __name__ == "__main__":
  app.run(main)
