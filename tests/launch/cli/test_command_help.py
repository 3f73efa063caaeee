"""--help of every command fits two screens, and wrong flags end with a code."""

import json
import os
import subprocess
import sys

import pytest
from absl import flags as absl_flags

from launch.cli import command_help
from twinmesh import command, top_packages

LINES, COLUMNS = 48, 80
# One process asks all commands, as most of the time goes to what they import.
# Their flags have names in common, so each takes its own away.
ASK_ALL = """
import contextlib, io, json, runpy, sys
from absl import flags

found = {}
for module in sys.argv[1:]:
  said, known = io.StringIO(), {*flags.FLAGS}
  sys.argv[1:] = ["--help"]
  try:
    with contextlib.redirect_stdout(said):
      runpy.run_module(module, run_name="__main__", alter_sys=True)
    code = 0
  except SystemExit as end:
    code = end.code or 0
  found[module] = code, said.getvalue()
  for name in {*flags.FLAGS} - known:
    if not flags.FLAGS.find_module_defining_flag(name).startswith("launch."):
      delattr(flags.FLAGS, name)
print(json.dumps(found))
"""


@pytest.mark.process
def test_help_of_every_command_fits_two_screens():
  # First: a --config of its own would meet that of the others.
  modules = ["launch.xm", *(name for name, _ in command.COMMANDS.values())]
  done = subprocess.run(
    [sys.executable, "-c", ASK_ALL, *modules],
    env={**os.environ, "PYTHONPATH": str(top_packages.ROOT)},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout)
  assert [*found] == modules
  for module, (code, text) in found.items():
    lines = text.splitlines()
    assert code == 0, module
    assert 4 <= len(lines) <= LINES, module
    assert max(map(len, lines)) <= COLUMNS, module
    # A command that is shown with a config lists the flag.
    assert ("--config=FILE" in text) <= ("\n  --config=.." in text), module


@pytest.fixture
def program(monkeypatch):
  """Has flags of a program of its own, while a test runs."""
  known = absl_flags.FlagValues()
  absl_flags.DEFINE_string(
    "zone", "", "Where it runs.", flag_values=known, module_name="program"
  )
  absl_flags.DEFINE_integer(
    "above", 2, "Too.", flag_values=known, module_name="program"
  )
  absl_flags.DEFINE_bool(
    "quiet", False, "Says less.", flag_values=known, module_name="program"
  )
  absl_flags.DEFINE_string(
    "config", None, "A file.", flag_values=known, module_name="elsewhere"
  )
  absl_flags.DEFINE_string(
    "run",
    None,
    "Needed.",
    flag_values=known,
    module_name="program",
    required=True,
  )
  known.register_key_flag_for_module("program", known["config"])
  monkeypatch.setattr(absl_flags, "FLAGS", known)
  monkeypatch.setattr("sys.argv", ["program"])
  return known


def test_flags_come_in_the_order_of_the_program_after_the_settings(program):
  lines = command_help.text().splitlines()
  first = lines.index("Flags, with their defaults:") + 1
  assert lines[first : first + 5] == [
    "  --config=..             A file.",
    "  --zone=..               Where it runs.",
    "  --above=2               Too.",
    "  --quiet                 Says less.",
    "  --run=..                Needed.",
  ]
  assert lines[-1].startswith("--helpfull")


def test_full_help_has_the_flags_of_other_modules(program):
  absl_flags.DEFINE_bool(
    "deep", True, "Far.", flag_values=program, module_name="far"
  )
  assert "deep" not in command_help.text()
  assert "far:\n  --[no]deep" in command_help.text(full=True)


@pytest.mark.parametrize("asked", ["--help", "-h", "--helpshort", "--helpfull"])
def test_help_ends_with_code_0(program, capsys, asked):
  with pytest.raises(SystemExit) as end:
    command_help.parse(["program", "--zone=a", asked])
  assert not end.value.code
  assert "--zone" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("argument", "message"),
  [
    (
      "--zome=a",
      "error: Unknown command line flag 'zome'. Did you mean: zone ?\n"
      "more: twinmesh explain TM-C01\n",
    ),
    (
      "--confg.rounds=2",
      "error: Unknown command line flag 'confg.rounds'. Did you mean: "
      "config.rounds ?\nmore: twinmesh explain TM-C01\n",
    ),
    (
      "--zone=a",
      "error: --run is missing; see --help\nmore: twinmesh explain TM-C02\n",
    ),
  ],
)
def test_a_wrong_flag_ends_with_code_2(program, capsys, argument, message):
  with pytest.raises(SystemExit) as end:
    command_help.parse(["program", argument])
  assert (end.value.code, capsys.readouterr().err) == (2, message)


def test_what_follows_two_dashes_is_no_flag(program):
  assert command_help.parse(["program", "--run=a", "--", "--help"]) == [
    "program",
    "--help",
  ]
