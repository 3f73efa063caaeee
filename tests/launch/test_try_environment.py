"""The command on configs of ours, on a broken one, and on wrong flags."""

import asyncio
import functools
import io
import re
import subprocess
import sys

import pytest
import rich.console

from configs import next_letter
from envs import base, recordings, rows
from envs.rewards import rewards
from launch import try_environment
from models.chat import hf_chat, word_chat
from rl.rollout import environment_trial, episode
from rl.rollout import recordings as conversations
from tests.helpers import chat_messages, commands, openai_server, processes

LETTERS = "--config=configs/next_letter.py"
BROKEN = """
import dataclasses
from configs import next_letter
from envs import base

class Generous:
  def __init__(self, task):
    self.task = task
  async def start(self):
    return [base.Message("user", "a")]
  async def step(self, answer):
    return base.Step([], reward=1.0, done=True, metrics={"said": 2})
  async def close(self):
    pass

@dataclasses.dataclass(frozen=True)
class Source(next_letter.NextLetter):
  def __call__(self, task):
    return Generous(task)

def get_config():
  return dataclasses.replace(next_letter.get_config(), environment=Source())
"""
BLOCKING = BROKEN.replace(
  "    return base.Step(", "    time.sleep(1000)\n    return base.Step("
).replace("import dataclasses", "import dataclasses, time", 1)


def tried(*arguments):
  return commands.run("launch.try_environment", *arguments)


@pytest.fixture(autouse=True)
def wide(monkeypatch):
  monkeypatch.setenv("COLUMNS", "400")


@pytest.mark.parametrize(
  ("config", "start"),
  [
    ("next_letter", r"[a-g]<agent>\[[b-h]<end>\]\n"),
    ("sums", r"the number alone\.<\|im_end\|>\n<\|im_start\|>assistant\n\["),
    ("tool_calculator_hf", r'"calculate".*"expression": "\d\d[-+*]\d"'),
    ("guess_number_moe", r"guess<agent>\[10<end>\]\n(low|high)er<agent>\[\d+<"),
  ],
)
def test_our_environments_are_shown_and_pass(config, start):
  result = tried(f"--config=configs/{config}.py", "--tasks=4")
  assert result.returncode == 0, result.stdout + result.stderr
  assert re.search(start, result.stdout)
  assert "status completed, reward 1" in result.stdout
  assert "FAILED" not in result.stdout
  assert result.stdout.endswith("all is well\n")


def test_of_a_run_without_rounds_limits_may_cut_what_is_recorded():
  config = "--config=configs/sft_chats.py"
  result = tried(config, "--config.rollout.turn_tokens=1", "--tasks=2")
  assert result.returncode == 0, result.stdout + result.stderr
  start = r"as it is trained .*\n\na<agent>\[b<end>\]\na<agent>\[b<end>\]\n"
  assert re.search(start, result.stdout)
  assert "rollout.turn_tokens=1 cut 2 answers" in result.stdout


def test_what_is_wrong_is_said_and_is_the_exit_code(tmp_path):
  file = tmp_path / "broken.py"
  file.write_text(BROKEN)
  result = tried(f"--config={file}", "--tasks=2")
  assert result.returncode == 1
  assert re.search(r"junk +FAILED +12 of 12 answers; empty: ear", result.stdout)
  assert "env/said 2" in result.stdout
  assert result.stdout.endswith("1 of 13 checks failed\n")


@pytest.mark.process
def test_a_step_that_blocks_all_else_is_told_and_ends_it(tmp_path):
  (tmp_path / "blocking.py").write_text(BLOCKING)
  program = """
import sys
from absl import app
from launch import try_environment
from launch.cli import flags
try_environment._PATIENCE_S = 0.2
app.run(try_environment.main, flags_parser=flags.parse)
"""
  done = subprocess.run(
    [
      *(sys.executable, "-c", program, f"--config={tmp_path}/blocking.py"),
      "--config.rollout.step_s=0.5",
    ],
    cwd=commands.ROOT,
    capture_output=True,
    text=True,
    timeout=processes.DEADLINE_S,
    check=False,
  )
  assert done.returncode == 1, done.stderr
  assert "in step\n    time.sleep(1000)" in done.stderr
  assert "a call has blocked the event loop for 0.7 s" in done.stderr


def test_limits_that_cut_only_wrong_answers_are_warned_of():
  result = tried(
    "--config=configs/guess_number_moe.py",
    "--config.rollout.max_turns=4",
    "--tasks=4",
  )
  assert result.returncode == 0, result.stdout + result.stderr
  assert re.search(
    r"random answers +warning +\d of 4 episodes did not reach their end "
    r"\(rollout.max_turns=4 cut \d episodes\): raise the limit",
    result.stdout,
  )
  assert result.stdout.endswith("all is well, with warnings: 1\n")


def test_answers_of_a_user_are_played(tmp_path):
  file = tmp_path / "answers.txt"
  file.write_text("c\n")
  result = tried(LETTERS, f"--answers={file}", "--tasks=1")
  assert result.returncode == 0, result.stdout
  assert "<agent>[c<end>]" in result.stdout
  unknown = tried(LETTERS, "--answer=z", "--tasks=1")
  assert unknown.returncode == 1
  assert "engine_fault: word 'z' is not among" in unknown.stdout


def test_random_answers_are_played():
  result = tried(LETTERS, "--policy=random", "--tasks=2")
  assert result.returncode == 0, result.stdout


def test_a_served_model_plays():
  chat = word_chat.WordChat(next_letter.LETTERS)
  with openai_server.serve(chat) as server:
    server.text = "d"
    url = f"--base_url={server.address}/v1"
    result = tried(LETTERS, url, "--tasks=2")
  assert result.returncode == 0, result.stdout
  assert "<agent>[d<end>]" in result.stdout
  # The server is gone: said, and no traceback.
  gone = tried(LETTERS, url, "--tasks=1")
  assert gone.returncode == 1
  assert "giving an answer raised APIConnectionError" in gone.stdout


def test_a_run_that_talks_as_a_model_is_shown_in_its_template():
  length = 192
  result = tried(
    LETTERS,
    f"--config.chat=hf(directory='{chat_messages.GOLDEN}')",
    "--config.model.vocab_size=768",
    f"--config.model.max_length={length}",
    f"--config.rollout.max_tokens={length}",
    "--config.rollout.turn_tokens=4",
    f"--config.batch.length={length}",
    "--tasks=1",
  )
  assert result.returncode == 0, result.stdout + result.stderr
  turn = r"<\|im_start\|>user\n[a-g]<\|im_end\|>\n<\|im_start\|>assistant\n"
  assert re.search(rf"{turn}\[[b-h]<\|im_end\|>\]\n", result.stdout)


def test_an_agent_is_one_error_and_no_list_of_faults():
  result = tried("--config=configs/agent_letters.py")
  assert result.returncode == 2
  assert result.stdout == ""
  assert "error: environment letters is a program" in result.stderr
  assert "launch.serve" in result.stderr


def test_a_source_is_tried_without_a_config():
  result = tried("--environment=guess_the_number(turns=2)", "--tasks=2")
  assert "guess<agent>[10<end>]" in result.stdout
  assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    ([], "--config is missing"),
    (["--environment=guess_the_numbr"], "did you mean guess_the_number?"),
    (["--environment=frozen_lake", LETTERS], "use --config.environment='fro"),
    ([LETTERS, "--policy=scripted"], "needs answers: --answer=TEXT"),
    ([LETTERS, "--policy=served"], "needs the address of an OpenAI API"),
    ([LETTERS, "--policy=random", "--base_url=x"], "and no other takes one"),
    ([LETTERS, "--policy=random", "--answer=a"], "has its own answers"),
    # A file without a line: the oracle would play in its place.
    ([LETTERS, "--answers=/dev/null"], "needs answers: --answer=TEXT"),
    ([LETTERS, "--model=x"], "--model=x without --base_url"),
    ([LETTERS, "--answers=none.txt"], "--answers=none.txt cannot be read"),
    (["--config=configs/simulated_3000.py"], "must give an rl.experiment"),
  ],
)
def test_flags_that_cannot_work_are_refused(arguments, words):
  result = tried(*arguments)
  assert result.returncode == 2
  assert words in result.stderr
  assert not result.stdout


def test_text_of_several_ids_is_whole_and_control_characters_are_visible():
  chat = hf_chat.HfChat.load(chat_messages.GOLDEN)
  ids = chat.open([base.Message("user", "\U0001f642\x1b[2J")])
  assert "user\n\U0001f642\\x1b[2J<|im_end|>" in try_environment.shown(
    chat, ids
  )


@pytest.mark.parametrize(
  ("terminal", "no_colour", "mark"),
  [
    (True, False, "a<agent>\x1b[7mb<end>\x1b[0m\n"),
    (True, True, "a<agent>[b<end>]\n"),
    (False, False, "a<agent>[b<end>]\n"),
  ],
)
def test_what_is_sampled_is_inverse_on_a_terminal_that_may_have_colour(
  terminal, no_colour, mark, monkeypatch
):
  monkeypatch.delenv("NO_COLOR", raising=False)
  monkeypatch.setenv("TERM", "xterm")
  if no_colour:
    monkeypatch.setenv("NO_COLOR", "1")
  source = next_letter.NextLetter()
  chat = word_chat.WordChat(next_letter.LETTERS)
  trial = environment_trial.Trial(
    source=source,
    reward=rewards.Outcome(),
    limits=episode.Limits(),
    chat=chat,
    respond=environment_trial.demonstration(source),
  )
  task = base.Task("next_letter/train/0", 0, "train", seed=0)
  played = asyncio.run(environment_trial.play(trial, task))
  file = io.StringIO()
  console = rich.console.Console(file=file, force_terminal=terminal)
  try_environment.show(played, chat, console)
  assert mark in file.getvalue()


def pairs():
  return [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 20


def test_recordings_are_shown_as_they_are_trained():
  source = recordings.Pairs(rows=rows.Rows(data=pairs))
  chat = word_chat.WordChat(next_letter.LETTERS)
  file = io.StringIO()
  console = rich.console.Console(file=file)
  load = functools.partial(
    conversations.load, source, chat, "train", length=8, max_length=8
  )
  try_environment.show_recordings(load, chat, console)
  shown = file.getvalue()
  assert shown.startswith("pairs[0], as it is trained (sampled: [marked]):\n\n")
  assert re.findall(r"a<agent>\[.*\]", shown) == [
    "a<agent>[b<end>]",
    "a<agent>[c<end>]",
  ]
