"""The README's commands run, its links and figures exist."""

import pathlib
import re
import subprocess
import sys
import threading

import pytest

from configs import guess_number_own
from rl.algorithms import losses
from tests.helpers import commands, machine_speed, markdown

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "README.md"
README = PAGE.read_text()
COMMANDS = markdown.commands(PAGE)
SMALL = [
  "--config.rounds=1",
  "--config.model.num_layers=1",
  "--config.engine.slots=64",
  "--config.engine.row_buckets=64,",
  "--config.engine.chunk_buckets=8,",
  "--config.overlap.groups_per_round=4",
  "--config.overlap.groups_per_microbatch=4",
  "--config.warm_start=none",
  "--config.evaluation.episodes=8",
]
# The servers, and the words before their address.
SERVERS = {"launch.serve": "is served at", "launch.view": "are shown at"}
SMALL_CLUSTER = [
  "--config.rounds=7",
  "--config.warmup=1",
  "--config.overlap.groups_per_round=8",
  "--config.overlap.groups_per_microbatch=8",
]


def test_every_command_of_the_readme_is_one_that_is_run():
  make = [c for c in COMMANDS if c[0] == "make"]
  python = [c for c in COMMANDS if c[0] == "python"]
  assert make == [["make", "train"], ["make", "test"]]
  ci = (ROOT / ".ci" / "run").read_text()
  assert "make test" in ci
  assert "make train" in ci
  assert [c[2] for c in python] == [
    "launch.train",
    "launch.evaluate",
    "launch.report",
    "launch.view",
    "launch.try_environment",
    "launch.serve",
    "launch.simulate",
    "launch.train",
  ]
  lines = "".join(markdown.blocks(PAGE)).splitlines()
  assert all(re.match(r"make |python -m |    --", line) for line in lines)


@pytest.mark.slow
def test_the_commands_of_the_readme_work(tmp_path):
  for command in COMMANDS:
    if command[0] != "python":
      continue
    small = {
      "launch.train": SMALL,
      "launch.evaluate": ["--episodes=8"],
      "launch.simulate": SMALL_CLUSTER,
    }.get(command[2], [])
    arguments = [a.replace("runs/mine", str(tmp_path / "run")) for a in command]
    if command[2] in SERVERS:
      _serves(arguments[1:], tmp_path, SERVERS[command[2]])
      continue
    result = commands.launch(*arguments[2:], *small)
    assert result.returncode == 0, (command, result.stderr)


def test_the_task_of_the_readme_passes_all_checks_as_it_stands(tmp_path):
  whole = (ROOT / "configs" / "next_letter.py").read_text()
  imports, _, _ = whole.partition("@dataclasses")
  _, get_config, config = whole.partition("def get_config")
  pieces = markdown.blocks(PAGE, "python")[:2]
  file = tmp_path / "pasted.py"
  file.write_text("\n\n".join([imports, *pieces, get_config + config]))
  result = commands.run("launch.try_environment", f"--config={file}")
  assert result.returncode == 0, result.stdout + result.stderr


def test_the_loss_of_the_readme_is_one_as_it_stands():
  names = dict(vars(guess_number_own))
  exec("\n".join(markdown.blocks(PAGE, "python")[2:]), names)
  assert isinstance(names["Spo"](), losses.Loss)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["next_letter", "guess_number_own"])
def test_the_configs_that_the_readme_quotes_train(config, tmp_path):
  where = [f"--config=configs/{config}.py", f"--workdir={tmp_path}"]
  result = commands.run("launch.train", *where, *SMALL)
  assert result.returncode == 0, result.stderr
  assert (tmp_path / "report.html").exists()


def _serves(arguments, tmp_path, told):
  """Checks that the command serves, and ends when it is asked to."""
  kept = [a.replace("=sessions", f"={tmp_path}/sessions") for a in arguments]
  kept = [str(tmp_path) if a == "runs" else a for a in kept]
  with subprocess.Popen(
    [sys.executable, *kept, "--port=0"],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    text=True,
    stdin=subprocess.DEVNULL,
  ) as server:
    killer = threading.Timer(200, server.kill)
    killer.start()
    assert server.stdout is not None
    line = server.stdout.readline()
    server.terminate()
    assert server.wait(machine_speed.scaled(60)) == 0
    killer.cancel()
  assert f"{told} http://127.0.0.1:" in line


@pytest.mark.parametrize(
  "target", re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
)
def test_what_the_readme_links_to_exists(target):
  assert (ROOT / target).exists()
