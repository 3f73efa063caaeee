"""The timeline of a simulated run, as text and as spans of a trace."""

from collections.abc import Sequence

from rl.runtime import trace
from rl.simulation import result as simulation_result
from rl.simulation import simulate

_SHADES = " ▁▂▃▄▅▆▇█"


def spans(record: simulate.RunRecord) -> list[trace.Span]:
  """Returns the spans of the learner, of publishes and of each engine."""
  found = list(record.spans)
  numbers: dict[str, int] = {}
  pools = record.settings.cluster.engine_pools
  for pool, states in zip(pools, record.states, strict=True):
    number = numbers[pool.name] = numbers.get(pool.name, -1) + 1
    for state in ("decode", "prefill", "publish"):
      found += [
        trace.Span(f"{pool.name} {number}", state, start, end)
        for start, end in simulation_result.in_state(
          states, record.virtual_s, state
        )
      ]
  return found


def text(record: simulate.RunRecord, width: int) -> str:
  """Returns a row for the learner, one for each pool, and one of publishes.

  A full block is all of the time, or all of a pool's engines, at work.
  """
  pools = record.settings.cluster.pools
  name_width = max(len("publish"), *(len(pool.name) for pool in pools))
  columns = max(1, width - name_width - 3)
  end_s = record.virtual_s
  rows = {"learner": [trace.busy(record.spans, "learner")]}
  pools = record.settings.cluster.engine_pools
  for pool, states in zip(pools, record.states, strict=True):
    decode = simulation_result.in_state(states, end_s, "decode")
    rows.setdefault(pool.name, []).append(decode)
  rows["publish"] = [trace.busy(record.spans, "host")]
  lines = [
    f"{name:>{name_width}} |{_row(tracks, end_s, columns)}|"
    for name, tracks in rows.items()
  ]
  start, end = "0 s", f"{end_s:,.0f} s"
  scale = start + end.rjust(columns - len(start))
  return "\n".join([*lines, f"{'':{name_width}}  {scale}"])


def _row(
  tracks: Sequence[Sequence[trace.Interval]], end_s: float, columns: int
) -> str:
  """Returns the share of time at work in each of the columns, shaded."""
  step_s = end_s / columns
  work_s = [0.0] * columns
  for start, end in (interval for track in tracks for interval in track):
    first, last = int(start / step_s), min(int(end / step_s), columns - 1)
    for i in range(first, last + 1):
      inside = min(end, (i + 1) * step_s) - max(start, i * step_s)
      work_s[i] += max(0.0, inside)
  shares = (min(s / step_s / len(tracks), 1.0) for s in work_s)
  top = len(_SHADES) - 1
  # What is there at all is seen.
  return "".join(
    _SHADES[max(round(share * top), int(share > 0))] for share in shares
  )
