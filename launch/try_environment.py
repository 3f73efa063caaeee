"""Tries an environment before it is trained on.

python -m launch.try_environment --config=configs/next_letter.py

Plays tasks without a model, prints the first conversation as a model would see
it, plays them again with random answers, and says what is wrong with the
environment. Exit code: 0 if nothing is.
"""

import asyncio
import contextlib
import functools
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Callable, Sequence

import numpy as np
import rich.console
import rich.table
import rich.text
from absl import app
from absl import flags as absl_flags

from envs import base
from envs.rewards import rewards
from launch.cli import flags, steps
from launch.gateway import player
from models.chat import byte_chat
from rl import experiment as experiment_lib
from rl.data import trajectory
from rl.loop import fine_tuning
from rl.rollout import (
  chats,
  environment_checks,
  environment_trial,
  episode,
  group_rollout,
  recordings,
)
from rl.runtime import watchdog as watchdog_lib
from rl.settings import annotations, checks
from twinmesh import error_codes

_ENVIRONMENT = absl_flags.DEFINE_string(
  "environment",
  None,
  "A source by itself, in place of --config, such as guess_number(turns=4) or "
  "mine.Source: played with generous limits and graded by its own rewards.",
)
_POLICY = absl_flags.DEFINE_enum(
  "policy",
  None,
  ["demonstration", "random", "scripted", "served"],
  "Answers: the source's oracle, random ones, those of --answer and --answers, "
  "or those of a model at --base_url. Default: what these flags give, else the "
  "oracle if the source has one, else random.",
)
_ANSWER = absl_flags.DEFINE_multi_string(
  "answer", [], "Answer of a turn; repeat it for more. The last is repeated."
)
_ANSWERS = absl_flags.DEFINE_string(
  "answers", None, "File of such answers, one a line."
)
_BASE_URL = absl_flags.DEFINE_string(
  "base_url",
  None,
  "OpenAI API that gives the answers, such as http://127.0.0.1:8000/v1 of "
  "launch.serve. Its key is read from OPENAI_API_KEY.",
)
_MODEL = absl_flags.DEFINE_string(
  "model", "", "A model of --base_url. Default: the first that it lists."
)
_TASKS = absl_flags.DEFINE_integer(
  "tasks", 8, "Training tasks to play.", lower_bound=1
)
# Shows --config in --help.
absl_flags.adopt_module_key_flags(flags)

_MIN_WIDTH = 80
_PATIENCE_S = 10.0
"""Time for which a call may block the event loop, on top of a step's."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@flags.command
def main() -> None:
  """Prints a conversation and the checks; exits with 1 if one fails."""
  with flags.exit_on_setting_error():
    trial = _trial()
  try:
    with steps.Steps(sys.stderr) as told:
      played, results = asyncio.run(_checked(trial, told.phase))
  except environment_trial.PlaysItself as error:
    error_codes.fail(error)
  console = rich.console.Console(
    file=sys.stdout,
    markup=False,
    emoji=False,
    highlight=False,
    width=max(_MIN_WIDTH, shutil.get_terminal_size().columns),
  )
  if trial.recorded is not None and played:
    show_recordings(trial.recorded, trial.chat, console)
  if played:
    show(played[0], trial.chat, console)
  console.print(_table(results))
  wrong = sum(bool(result.fault) for result in results)
  warnings = sum(bool(result.warning) for result in results)
  well = (
    f"all is well, with warnings: {warnings}" if warnings else "all is well"
  )
  print(f"{wrong} of {len(results)} checks failed" if wrong else well)
  if wrong:
    sys.exit(1)


async def _checked(
  trial: environment_trial.Trial, report: Callable[[str], None]
) -> tuple[
  list[environment_trial.PlayedEpisode], list[environment_checks.CheckResult]
]:
  """Returns what was played, and the checks; ends where a call blocks it."""
  end_s = trial.limits.step_s + _PATIENCE_S
  watchdog = watchdog_lib.Watchdog(report=_tell)

  def end() -> None:
    _tell(
      f"a call has blocked the event loop for {end_s:g} s, and nothing else "
      "runs meanwhile: see above where. Await it, call it by "
      "envs.threads.call, or run the environment in envs.workers.Processes"
    )
    os._exit(1)

  with watchdog.guard(loop_lag_s=_PATIENCE_S, end_s=end_s, end=end):
    return await environment_checks.run(trial, _TASKS.value, report)


def _tell(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


def show(
  played: environment_trial.PlayedEpisode,
  chat: episode.Chat,
  console: rich.console.Console,
) -> None:
  """Prints an episode as a model sees it, special tokens included.

  What is sampled, and trained, is inverse on a terminal; elsewhere, and with
  NO_COLOR, it stands in [brackets].
  """
  one = played.trajectory
  write = functools.partial(console.print, soft_wrap=True)
  _show_turns(f"{played.task.id}, as the model sees it", one, chat, console)
  for message in _unread(played.transcript.messages):
    write(rich.text.Text(f"({message.role}) {_safe(message.content)}"))
  reward = "none" if one.reward is None else f"{one.reward:g}"
  rewards_of_steps = ", ".join(f"{r:g}" for r in played.transcript.step_rewards)
  write(f"\nstatus {one.status.value}, reward {reward}", end="")
  write(f" (steps: {rewards_of_steps})" if rewards_of_steps else "")
  for kind, numbers in (("reward", one.parts), ("env", one.metrics)):
    for name, value in numbers.items():
      write(rich.text.Text(f"{kind}/{name} {value:g}"))
  if one.fault:
    write(rich.text.Text(_safe(one.fault)))
  if played.traceback:
    write(rich.text.Text(_safe(f"\n{played.traceback}")))
  write()


def show_recordings(
  load: Callable[[int], recordings.Examples],
  chat: episode.Chat,
  console: rich.console.Console,
) -> None:
  """Prints the first example as it is trained: of a pair both conversations."""
  with contextlib.suppress(recordings.UnusableRow):  # A check says why.
    for one in load(1).examples[0]:
      _show_turns(f"{one.task_id}, as it is trained", one, chat, console)
      console.print()


def _show_turns(
  title: str,
  one: trajectory.Trajectory,
  chat: episode.Chat,
  console: rich.console.Console,
) -> None:
  inverse = console.is_terminal and "NO_COLOR" not in os.environ
  write = functools.partial(console.print, soft_wrap=True)
  write(rich.text.Text(f"{title} (sampled: "), end="")
  write(_sampled("marked", inverse), end="):\n\n")
  for turn in one.turns:
    write(rich.text.Text(shown(chat, turn.context)), end="")
    write(_sampled(shown(chat, turn.tokens), inverse), end="")
    write()


def shown(chat: episode.Chat, ids: Sequence[int] | np.ndarray) -> str:
  """Returns ids as text, with special tokens by their names."""
  pieces: list[str] = []
  run: list[int] = []
  for index in map(int, ids):
    if chat.decode([index]):
      run.append(index)
      continue
    pieces += [chat.decode(run), chat.token(index)]
    run = []
  return _safe("".join([*pieces, chat.decode(run)]))


def _sampled(text: str, inverse: bool) -> rich.text.Text:
  if inverse:
    return rich.text.Text(text, style="reverse")
  return rich.text.Text(f"[{text}]")


def _unread(messages: Sequence[base.Message]) -> list[base.Message]:
  """Returns the messages after the last answer, which no model reads."""
  last = max(
    (i for i, m in enumerate(messages) if m.role == "assistant"), default=-1
  )
  return list(messages[last + 1 :])


def _safe(text: str) -> str:
  """Returns text whose control characters cannot steer a terminal."""
  return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def _table(
  results: Sequence[environment_checks.CheckResult],
) -> rich.table.Table:
  table = rich.table.Table(box=None, pad_edge=False, show_header=False)
  for result in results:
    wrong = result.fault or result.warning
    words = f"{wrong} ({result.seen})" if result.seen else wrong
    state = "warning" if result.warning else "ok"
    table.add_row(
      result.name,
      "FAILED" if result.fault else state,
      rich.text.Text(_safe(words if wrong else result.seen)),
    )
  return table


def _trial() -> environment_trial.Trial:
  """Returns what the flags ask for.

  Raises:
    ValueError: it cannot be tried.
  """
  if _ENVIRONMENT.value is None:
    check = flags.instance_of(
      experiment_lib.Experiment, "configs/next_letter.py"
    )
    experiment = flags.load_from_command_line(check)
    limits, chat = experiment.rollout, experiment.build_chat()
    source, reward = experiment.environment, experiment.reward
    seed = experiment.seed
    recorded, start = None, experiment.warm_start
    is_played = experiment.rounds > 0
    if isinstance(start, fine_tuning.FineTuning):
      recorded = functools.partial(
        recordings.load,
        fine_tuning.recorded(source, start),
        chat,
        "train",
        length=experiment.batch.length,
        max_length=experiment.model.max_length,
        too_long=start.too_long,
      )
  else:
    source: base.Source = flags.read_alone(base.Source, "environment")
    reward, seed, recorded, is_played = rewards.Outcome(), 0, None, True
    limits = group_rollout.Rollout(turn_tokens=4_096, max_tokens=32_768)
    is_listed = isinstance(source, base.WordList)
    chat = (
      chats.build(chats.Words(), source, None)
      if is_listed
      else byte_chat.ByteChat()
    )
  checks.validate_installed(source)
  policy, respond = _respond(source, chat, limits.turn_tokens)
  return environment_trial.Trial(
    source=source,
    reward=reward,
    limits=limits,
    chat=chat,
    respond=respond,
    plays_well=policy == "demonstration" and is_played,
    reward_s=limits.grading.deadline_s,
    seed=seed,
    recorded=recorded,
  )


def _respond(
  source: base.Source, chat: episode.Chat, turn_tokens: int
) -> tuple[str, environment_trial.Respond]:
  """Returns the name of a policy, and its answers."""
  lines, url = _lines(), _BASE_URL.value
  has_oracle = environment_trial.demonstrates(source)
  own = "demonstration" if has_oracle else "random"
  is_scripted = lines or _ANSWERS.value is not None
  given = "scripted" if is_scripted else "served" if url else own
  policy = _POLICY.value or given
  if lines and policy != "scripted":
    raise annotations.SettingError(
      f"--policy={policy} has its own answers; use scripted, or no --answer"
    )
  if (policy == "served") != bool(url):
    raise annotations.SettingError(
      f"--policy={policy} with --base_url={url or ''}: a served policy needs "
      "the address of an OpenAI API, and no other takes one"
    )
  if _MODEL.value and not url:
    raise annotations.SettingError(
      f"--model={_MODEL.value} without --base_url: name the API that serves it"
    )
  if url:
    key = os.environ.get("OPENAI_API_KEY", "none")
    return policy, player.player(url, _MODEL.value, key, turn_tokens)
  if policy == "demonstration":
    return policy, environment_trial.demonstration(source)
  if policy == "random":
    return policy, environment_trial.exploration(source, chat)
  if not lines:
    raise annotations.SettingError(
      "--policy=scripted needs answers: --answer=TEXT, or --answers=FILE with "
      "one a line"
    )
  return policy, environment_trial.script(lines)


def _lines() -> list[str]:
  if _ANSWERS.value is None:
    return _ANSWER.value
  try:
    text = pathlib.Path(_ANSWERS.value).read_text("utf-8")
  except (OSError, UnicodeDecodeError) as error:
    raise annotations.SettingError(
      f"--answers={_ANSWERS.value} cannot be read: {error}"
    ) from error
  return [*_ANSWER.value, *text.splitlines()]


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
