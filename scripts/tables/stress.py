"""Many groups, many rounds, hostile requests and files."""

from collections.abc import Mapping
from typing import Any

from scripts.tables import cells


def coordinator(result: Mapping[str, Any]) -> cells.Rows:
  """Yields turns a second of one core for each case."""
  yield "case", "turns/s", "a turn"
  names = {
    "sync": "one round after the other",
    "in flight": "in flight, eta = 1",
    "yielding": "the same, each answer a turn of the event loop later",
    "checked": "the same, log checked and tokens booked",
    "packed": "the same, trained groups packed into rows",
  }
  for name, case in result["cases"].items():
    yield (
      names[name],
      f"{case['turns_per_s']:,.0f}",
      f"{case['us_per_turn']:.0f} us",
    )


def coordinator_memory(result: Mapping[str, Any]) -> cells.Rows:
  """Yields memory over the trajectories that were played."""
  memory = result["memory"]
  yield "trajectories", *(f"after {at}" for at in memory["resident_mib"])
  yield (
    f"{memory['trajectories']:,}",
    *(f"{mib:.1f} MiB" for mib in memory["resident_mib"].values()),
  )


def long_run(result: Mapping[str, Any]) -> cells.Rows:
  """Yields the growth of the long runs, and the verdict on their logs."""
  runs = [found for name in ("simulated", "real") if (found := result[name])]
  yield "", *(f"{run['rounds']:,} rounds" for run in runs)
  names = {
    "resident_mib": "memory",
    "descriptors": "open files",
    "threads": "threads",
    "tasks": "tasks",
    "waits": "waits",
    "checkpoint_kib": "checkpoints",
  }
  for key, name in names.items():
    cells = [run["growth"].get(key) for run in runs]
    shown = ["" if x is None else f"{100 * x + 0.0:+.1f}%" for x in cells]
    yield f"{name}, last quarter against the second", *shown
  yield (
    "event log on disk",
    *(f"{run['events_disk_mib']:.1f} MiB" for run in runs),
  )
  yield (
    "segments of it, and those deleted",
    *(f"{run['segments']}, {run.get('segments_deleted', 0)}" for run in runs),
  )
  yield "broken promises", *(str(len(run["violations"])) for run in runs)
  yield "tokens not booked", *(str(run["ledger_error"]) for run in runs)


def hostile_server(result: Mapping[str, Any]) -> cells.Rows:
  """Yields what large requests got, and how long others waited meanwhile."""
  yield ("request", "status", "took", "others waited", "at most")
  for row in result["server"]:
    yield (
      row["request"],
      str(row["status"]),
      f"{row['took_s']:.1f} s",
      f"{row['others_ms']:.0f} ms",
      f"{row['worst_ms']:.0f} ms",
    )


def hostile_files(result: Mapping[str, Any]) -> cells.Rows:
  """Yields what became of runs whose files were damaged."""
  fates = ("moved aside", "left as it is", "refused")
  yield ("damage", "tried", "shown", *fates, "anything else")
  for row in result["files"]:
    counts = dict(row["outcomes"])
    shown = counts.pop("shown", 0)
    tried = sum(counts.values())
    known = [counts.pop(fate, 0) for fate in fates]
    numbers = (tried, shown, *known, sum(counts.values()))
    yield (row["damage"], *map(str, numbers))


def hostile_runs(result: Mapping[str, Any]) -> cells.Rows:
  """Yields how many runs went on after each way to hurt them."""
  yield ("hurt by", "tried", "survived")
  for row in (*result["kills"], *result["disks"]):
    way = row["way"].replace("_", " ")
    yield (way, str(row["tried"]), str(row["survived"]))


def hostile_roles(result: Mapping[str, Any]) -> cells.Rows:
  """Yields how many runs went on without a process of each kind."""
  yield ("process", "tried", "survived")
  for row in result["roles"]:
    way = row["way"].removeprefix("role_")
    name = f"{row['role']} {way}"
    yield (name, str(row["tried"]), str(row["survived"]))
