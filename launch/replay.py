"""Looks into an update that was skipped: python -m launch.replay BATCH.

BATCH is a directory such as runs/first/skipped/round_000012_update_0, which a
run leaves when a loss or gradient is not finite. It runs the gradient again
and names what is not finite: micro-batches, rows and trajectories, each of
them alone, columns, parameters. Where none of the first rows is finite it says
where to look, and stops. --where also names the operation.

The exit code is 0 when all is finite now, 1 when it is not, and 2 when there
is nothing to replay.
"""

import difflib
import itertools
import math
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator

from absl import app
from absl import flags as absl_flags

from launch.cli import flags, jax_setup, workdir
from rl import assemble
from rl import experiment as experiment_lib
from rl.runtime import checkpoint
from rl.settings import overrides
from rl.train import learner, nonfinite_diagnosis, skipped_updates

_WHERE = absl_flags.DEFINE_bool(
  "where", False, "Names the operation that makes the first nan; slow."
)
_MAX_ROWS = 16
_FIRST_ROWS = 8
_MAX_LEAVES = 8


def main(argv: list[str]) -> None:
  """Reads what was put away and the settings of its run; replays it."""
  with flags.exit_on_setting_error():
    if len(argv) != 2:
      raise overrides.SettingError(
        "name one skipped update, as RUN/skipped/round_000012_update_0"
      )
    path = named(argv[1])
    experiment = workdir.read(path.resolve().parents[1])
    jax_setup.prepare(experiment.placement)
    programs, skipped = read(path, experiment)
  sys.exit(replay(programs, skipped, print, where=_WHERE.value))


def named(argument: str) -> pathlib.Path:
  """Returns the directory of a skipped update.

  Raises:
    SettingError: there is none; it names the nearest.
  """
  path = pathlib.Path(argument)
  if (path / skipped_updates.BATCHES).is_file():
    return path
  for directory in (path, path / "skipped", path.parent):
    if found := {x.name: x for x in skipped_updates.updates(directory)}:
      near = difflib.get_close_matches(path.name, found, 1) or list(found)[-3:]
      choice = " or ".join(str(found[name]) for name in near)
      raise overrides.SettingError(
        f"{path} is no skipped update; did you mean {choice}?"
      )
  raise overrides.SettingError(
    f"{path} is no skipped update{_nearest(path)}; name a directory such as "
    "RUN/skipped/round_000012_update_0"
  )


def _nearest(path: pathlib.Path) -> str:
  """Returns what is wrong with a path, when it is a mistyped directory."""
  way = [*reversed(path.parents), path]
  missing = next((part for part in way if not part.exists()), None)
  if missing is None:
    return ""
  names = sorted(x.name for x in missing.parent.glob("*"))
  near = difflib.get_close_matches(missing.name, names, 1)
  choice = f"; did you mean {missing.parent / near[0]}?" if near else ""
  return f": {missing} does not exist{choice}"


def read(
  path: pathlib.Path, experiment: experiment_lib.Experiment
) -> tuple[learner.Learner, skipped_updates.SkippedUpdate]:
  """Returns the programs of the run and what it has put away.

  Raises:
    SettingError: that cannot be read, or is of another model.
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
  say: Callable[[str], None],
  *,
  where: bool = False,
) -> int:
  """Says what of an update is not finite; returns the exit code.

  Args:
    where: also looks for the operation that makes the first nan.
  """
  suspect = _tell_input(programs, skipped, say)
  total = nonfinite_diagnosis.outcome(programs, skipped, skipped.batches)
  say(f"update: {_numbers(total)}")
  if total.is_finite:
    return 0
  if total.leaves:
    say(f"parameters without a finite gradient: {_listed(total.leaves)}")
  elif math.isinf(total.norm):
    say("the gradient of every parameter is finite; their norm overflows")
  place = _first_if_all(programs, skipped)
  if place is not None:
    say(f"every row: look at {suspect}")
  else:
    place = _search(programs, skipped, say)
  if where:
    _tell_where(programs, skipped, place, say)
  return 1


def _tell_input(
  programs: learner.Learner,
  skipped: skipped_updates.SkippedUpdate,
  say: Callable[[str], None],
) -> str:
  """Says what the update met; returns where to look if every row fails."""
  height, length = skipped.batches[0].tokens.shape
  sampled = sum(int(packed.sampled.sum()) for packed in skipped.batches)
  say(
    f"round {skipped.round}, update {skipped.number}, at version "
    f"{skipped.version}: {sampled} sampled tokens, micro-batches of up to "
    f"{height} x {length}: {len(skipped.batches)}"
  )
  parameters = nonfinite_diagnosis.parameters(skipped)
  bad, (size, leaf) = parameters
  wrong = f"not finite: {_listed(bad)}" if bad else "finite"
  say(f"parameters: {wrong}; the largest is {size:.4g}, in {leaf}")
  columns = nonfinite_diagnosis.columns(programs, skipped)
  for column in columns:
    line = f"  {column.name:10}  {column.low:.4g} to {column.high:.4g}"
    if column.first is not None:
      place, index = column.first
      line += f"; not finite: {column.bad}, first {_at(place)} index {index}"
    say(line)
  return nonfinite_diagnosis.suspect(parameters, columns)


def _first_if_all(
  programs: learner.Learner, skipped: skipped_updates.SkippedUpdate
) -> nonfinite_diagnosis.RowPlace | None:
  """Returns the first row, if it and those after it all fail, each alone.

  None when one of the first is finite, or when there is one row alone.
  """
  every = itertools.chain.from_iterable(
    nonfinite_diagnosis.rows(skipped, i) for i in range(len(skipped.batches))
  )
  rows = list(itertools.islice(every, _FIRST_ROWS))
  if len(rows) < 2:
    return None
  bad = (place for place, _ in _bad(programs, skipped, rows))
  # A finite one comes early, if it comes at all.
  if all(found == row for found, row in itertools.zip_longest(bad, rows)):
    return rows[0]
  return None


def _search(
  programs: learner.Learner,
  skipped: skipped_updates.SkippedUpdate,
  say: Callable[[str], None],
) -> nonfinite_diagnosis.RowPlace | None:
  """Says which parts are not finite alone; returns the first smallest."""
  found, looked = None, 0
  for number, packed in enumerate(skipped.batches):
    outcome = nonfinite_diagnosis.outcome(programs, skipped, [packed])
    say(f"micro-batch {number}: {_numbers(outcome)}")
    if outcome.is_finite:
      continue
    for row, outcome in _bad(
      programs, skipped, nonfinite_diagnosis.rows(skipped, number)
    ):
      say(f"  row {row.row}: {_numbers(outcome)}")
      looked += 1
      smallest = row
      if looked <= _MAX_ROWS:
        smallest = _take_apart(programs, skipped, row, say) or row
      found = found or smallest
  if looked > _MAX_ROWS:
    say(f"only the first {_MAX_ROWS} of {looked} such rows were taken apart")
  if found is None:
    say("alone each part is finite: only together they are not")
  return found


def _bad(
  programs: learner.Learner,
  skipped: skipped_updates.SkippedUpdate,
  places: Iterable[nonfinite_diagnosis.RowPlace],
) -> Iterator[
  tuple[nonfinite_diagnosis.RowPlace, nonfinite_diagnosis.UpdateOutcome]
]:
  """Yields the parts that are not finite when they run alone."""
  for place in places:
    part = nonfinite_diagnosis.alone(skipped.batches[place.batch], place)
    outcome = nonfinite_diagnosis.outcome(programs, skipped, [part])
    if not outcome.is_finite:
      yield place, outcome


def _take_apart(
  programs: learner.Learner,
  skipped: skipped_updates.SkippedUpdate,
  row: nonfinite_diagnosis.RowPlace,
  say: Callable[[str], None],
) -> nonfinite_diagnosis.RowPlace | None:
  """Says which trajectories of a row are not finite; returns the first."""
  packed, parts = (
    skipped.batches[row.batch],
    nonfinite_diagnosis.trajectories(skipped, row),
  )
  parts = list(parts)
  bad = list(_bad(programs, skipped, parts))
  if len(bad) == len(parts) > 1:
    say(f"    nor is any of its {len(parts)} trajectories")
  else:
    for place, outcome in bad:
      first, last, count = nonfinite_diagnosis.span(packed, place)
      own = slice(first, last + 1)
      versions = packed.versions[row.row, own][packed.sampled[row.row, own]]
      say(
        f"    segment {place.segment}{_whose(skipped, place)}: "
        f"{_numbers(outcome)}; {count} tokens from index {first} to {last}, "
        f"of versions {versions.min()} to {versions.max()}"
      )
  return bad[0][0] if bad else None


def _tell_where(
  programs: learner.Learner,
  skipped: skipped_updates.SkippedUpdate,
  place: nonfinite_diagnosis.RowPlace | None,
  say: Callable[[str], None],
) -> None:
  batches = skipped.batches
  if place is not None:
    batches = [nonfinite_diagnosis.alone(batches[place.batch], place)]
  for packed in batches:
    found = nonfinite_diagnosis.first_nan(
      programs.accumulate,
      skipped.params,
      programs.zero(),
      packed,
      skipped.critic,
    )
    if found is not None:
      say(f"first operation with a nan: {found}")
      return
  say("no operation makes a nan: something is infinite")


def _numbers(outcome: nonfinite_diagnosis.UpdateOutcome) -> str:
  verdict = "finite" if outcome.is_finite else "NOT FINITE"
  numbers = f"loss {outcome.loss:.4g}, gradient norm {outcome.norm:.4g}"
  return f"{numbers}: {verdict}"


def _at(place: nonfinite_diagnosis.RowPlace) -> str:
  return f"in micro-batch {place.batch} row {place.row} segment {place.segment}"


def _whose(
  skipped: skipped_updates.SkippedUpdate, place: nonfinite_diagnosis.RowPlace
) -> str:
  """Returns " (group 3 member 1 of game/train/7)", where that is known."""
  owner = nonfinite_diagnosis.owner(skipped, place)
  return "" if owner is None else f" ({owner})"


def _listed(names: tuple[str, ...]) -> str:
  more = len(names) - _MAX_LEAVES
  listing = ", ".join(names[:_MAX_LEAVES])
  return f"{listing} and {more} more" if more > 0 else listing


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
