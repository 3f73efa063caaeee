"""Replays a skipped update: python -m launch.replay UPDATE.

UPDATE is a directory such as runs/first/skipped/round_000012_update_0, which a
run writes when a loss or gradient is not finite. The gradient is computed
again, and then for micro-batches, rows and trajectories, each alone, to name
those that are not finite, with columns and parameters. If all of the first
rows fail it points at their common cause and stops. --where also names the
operation.

The exit code is 0 if all is finite now, 1 if not, and 2 if there is nothing to
replay.
"""

import difflib
import itertools
import math
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator

from absl import app
from absl import flags as absl_flags

from launch.cli import flags, jax_setup, known_programs, steps, workdir
from rl import assemble
from rl import experiment as experiment_lib
from rl.runtime import checkpoint
from rl.settings import overrides
from rl.train import learner, nonfinite_diagnosis, skipped_updates

_WHERE = absl_flags.DEFINE_bool(
  "where", False, "Names the operation that produces the first nan; slow."
)
absl_flags.adopt_module_key_flags(known_programs)
_MAX_ROWS = 16
_FIRST_ROWS = 8
_MAX_LEAVES = 8


@flags.exit_on_interrupt()
def main(argv: list[str]) -> None:
  """Reads the update and the settings of its run, and replays it."""
  with flags.exit_on_setting_error():
    if len(argv) != 2:
      raise overrides.SettingError(
        "name one skipped update, as RUN/skipped/round_000012_update_0"
      )
    path = resolve(argv[1])
    experiment = workdir.read(path.resolve().parents[1])
    jax_setup.prepare(experiment.placement)
    programs, skipped = read(path, experiment)
  with steps.Steps(sys.stderr) as shown:
    shown.phase("replaying the update")
    code = replay(programs, skipped, print, where=_WHERE.value)
  sys.exit(code)


def resolve(argument: str) -> pathlib.Path:
  """Returns the directory of a skipped update.

  Raises:
    SettingError: it does not exist; the message suggests the nearest.
  """
  path = pathlib.Path(argument)
  if (path / skipped_updates.BATCHES).is_file():
    return path
  for directory in (path, path / "skipped", path.parent):
    if found := {x.name: x for x in skipped_updates.updates(directory)}:
      near = difflib.get_close_matches(path.name, found, 1) or list(found)[-3:]
      choice = " or ".join(str(found[name]) for name in near)
      raise overrides.SettingError(
        f"{path} is not a skipped update; did you mean {choice}?"
      )
  raise overrides.SettingError(
    f"{path} is not a skipped update{_nearest(path)}; name a directory such as "
    "RUN/skipped/round_000012_update_0"
  )


def _nearest(path: pathlib.Path) -> str:
  """Returns the first missing directory of a path and its nearest name."""
  parts = [*reversed(path.parents), path]
  missing = next((part for part in parts if not part.exists()), None)
  if missing is None:
    return ""
  names = sorted(x.name for x in missing.parent.glob("*"))
  near = difflib.get_close_matches(missing.name, names, 1)
  choice = f"; did you mean {missing.parent / near[0]}?" if near else ""
  return f": {missing} does not exist{choice}"


def read(
  path: pathlib.Path, experiment: experiment_lib.Experiment
) -> tuple[learner.Learner, skipped_updates.SkippedUpdate]:
  """Returns the programs of the run and its skipped update.

  Raises:
    SettingError: the update cannot be read, or belongs to another model.
  """
  layout = experiment.placement.layouts()[0]
  programs = assemble.learner_programs(experiment, layout)
  try:
    return programs, skipped_updates.read(path, programs.abstract)
  except (skipped_updates.Unreadable, checkpoint.Mismatch) as error:
    raise overrides.SettingError(str(error)) from error


def replay(
  programs: learner.Learner,
  skipped: skipped_updates.SkippedUpdate,
  log: Callable[[str], None],
  *,
  where: bool = False,
) -> int:
  """Logs the parts of an update that are not finite; returns the exit code.

  Args:
    where: also looks for the operation that produces the first nan.
  """
  suspect = _log_input(programs, skipped, log)
  total = nonfinite_diagnosis.outcome(programs, skipped, skipped.batches)
  log(f"update: {_numbers(total)}")
  if total.is_finite:
    return 0
  if total.leaves:
    log(f"parameters without a finite gradient: {_join(total.leaves)}")
  elif math.isinf(total.norm):
    log("the gradient of every parameter is finite; their norm overflows")
  place = _first_row_if_all_fail(programs, skipped)
  if place is not None:
    log(f"every row: look at {suspect}")
  else:
    place = _search(programs, skipped, log)
  if where:
    _log_operation(programs, skipped, place, log)
  return 1


def _log_input(
  programs: learner.Learner,
  skipped: skipped_updates.SkippedUpdate,
  log: Callable[[str], None],
) -> str:
  """Logs the input of the update; returns the suspect if every row fails."""
  height, length = skipped.batches[0].tokens.shape
  sampled = sum(int(packed.sampled.sum()) for packed in skipped.batches)
  log(
    f"round {skipped.round}, update {skipped.number}, at version "
    f"{skipped.version}: {sampled} sampled tokens, micro-batches of up to "
    f"{height} x {length}: {len(skipped.batches)}"
  )
  parameters = nonfinite_diagnosis.parameters(programs, skipped)
  nonfinite, (size, leaf) = parameters
  verdict = f"not finite: {_join(nonfinite)}" if nonfinite else "finite"
  log(f"parameters: {verdict}; the largest is {size:.4g}, in {leaf}")
  columns = nonfinite_diagnosis.columns(programs, skipped)
  for column in columns:
    line = f"  {column.name:10}  {column.low:.4g} to {column.high:.4g}"
    if column.first is not None:
      place, index = column.first
      line += (
        f"; not finite: {column.bad}, first in micro-batch {place.batch} row "
        f"{place.row} segment {place.segment} index {index}"
      )
    log(line)
  return nonfinite_diagnosis.suspect(parameters, columns)


def _first_row_if_all_fail(
  programs: learner.Learner, skipped: skipped_updates.SkippedUpdate
) -> nonfinite_diagnosis.RowPlace | None:
  """Returns the first row if all of the first rows fail, each alone.

  None if one of them is finite, or if there is only one row.
  """
  every = itertools.chain.from_iterable(
    nonfinite_diagnosis.rows(skipped, i) for i in range(len(skipped.batches))
  )
  rows = list(itertools.islice(every, _FIRST_ROWS))
  if len(rows) < 2:
    return None
  failing = (place for place, _ in _nonfinite(programs, skipped, rows))
  # Lazy: stops at the first finite row.
  if all(one == row for one, row in itertools.zip_longest(failing, rows)):
    return rows[0]
  return None


def _search(
  programs: learner.Learner,
  skipped: skipped_updates.SkippedUpdate,
  log: Callable[[str], None],
) -> nonfinite_diagnosis.RowPlace | None:
  """Logs the parts that are not finite alone; returns the first smallest."""
  found, num_rows = None, 0
  for number, packed in enumerate(skipped.batches):
    outcome = nonfinite_diagnosis.outcome(programs, skipped, [packed])
    log(f"micro-batch {number}: {_numbers(outcome)}")
    if outcome.is_finite:
      continue
    for row, outcome in _nonfinite(
      programs, skipped, nonfinite_diagnosis.rows(skipped, number)
    ):
      log(f"  row {row.row}: {_numbers(outcome)}")
      num_rows += 1
      smallest = row
      if num_rows <= _MAX_ROWS:
        smallest = _search_row(programs, skipped, row, log) or row
      found = found or smallest
  if num_rows > _MAX_ROWS:
    log(f"only the first {_MAX_ROWS} of {num_rows} such rows were searched")
  if found is None:
    log("alone each part is finite: only together they are not")
  return found


def _nonfinite(
  programs: learner.Learner,
  skipped: skipped_updates.SkippedUpdate,
  places: Iterable[nonfinite_diagnosis.RowPlace],
) -> Iterator[
  tuple[nonfinite_diagnosis.RowPlace, nonfinite_diagnosis.UpdateOutcome]
]:
  """Yields the parts that are not finite alone."""
  for place in places:
    part = nonfinite_diagnosis.alone(skipped.batches[place.batch], place)
    outcome = nonfinite_diagnosis.outcome(programs, skipped, [part])
    if not outcome.is_finite:
      yield place, outcome


def _search_row(
  programs: learner.Learner,
  skipped: skipped_updates.SkippedUpdate,
  row: nonfinite_diagnosis.RowPlace,
  log: Callable[[str], None],
) -> nonfinite_diagnosis.RowPlace | None:
  """Logs the trajectories of a row that are not finite; returns the first."""
  packed = skipped.batches[row.batch]
  parts = list(nonfinite_diagnosis.trajectories(skipped, row))
  failing = list(_nonfinite(programs, skipped, parts))
  if len(failing) == len(parts) > 1:
    log(f"    nor is any of its {len(parts)} trajectories")
  else:
    for place, outcome in failing:
      first, last, count = nonfinite_diagnosis.span(packed, place)
      own = slice(first, last + 1)
      versions = packed.versions[row.row, own][packed.sampled[row.row, own]]
      log(
        f"    segment {place.segment}{_owner(skipped, place)}: "
        f"{_numbers(outcome)}; {count} tokens from index {first} to {last}, "
        f"of versions {versions.min()} to {versions.max()}"
      )
  return failing[0][0] if failing else None


def _log_operation(
  programs: learner.Learner,
  skipped: skipped_updates.SkippedUpdate,
  place: nonfinite_diagnosis.RowPlace | None,
  log: Callable[[str], None],
) -> None:
  batches = skipped.batches
  if place is not None:
    batches = [nonfinite_diagnosis.alone(batches[place.batch], place)]
  for packed in batches:
    found = nonfinite_diagnosis.first_nan(
      programs.accumulate,
      skipped.params,
      None,
      packed,
      skipped.critic,
    )
    if found is not None:
      log(f"first operation with a nan: {found}")
      return
  log("no operation produces a nan: something is infinite")


def _numbers(outcome: nonfinite_diagnosis.UpdateOutcome) -> str:
  verdict = "finite" if outcome.is_finite else "NOT FINITE"
  numbers = f"loss {outcome.loss:.4g}, gradient norm {outcome.norm:.4g}"
  return f"{numbers}: {verdict}"


def _owner(
  skipped: skipped_updates.SkippedUpdate, place: nonfinite_diagnosis.RowPlace
) -> str:
  """Returns " (group 3 member 1 of game/train/7)", or "" if unknown."""
  owner = nonfinite_diagnosis.owner(skipped, place)
  return "" if owner is None else f" ({owner})"


def _join(names: tuple[str, ...]) -> str:
  more = len(names) - _MAX_LEAVES
  listing = ", ".join(names[:_MAX_LEAVES])
  return f"{listing} and {more} more" if more > 0 else listing


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse_without_settings)
