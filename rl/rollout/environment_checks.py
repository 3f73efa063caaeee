"""Checks of an environment before it is trained on.

run: play a few tasks -> faults, lengths, times, close
     random answers in their place -> random answers
     the same answers again -> repeats;  all at once -> parallel sessions
     junk in place of answers -> junk;   source, tasks, reward

Each check returns one `CheckResult`: what is wrong, or what was seen.
"""

import dataclasses
import itertools
import math
import pickle
import reprlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envs import base
from models.chat import byte_chat
from rl.data import trajectory
from rl.rollout import environment_trial as trial_lib
from rl.rollout import episode, prompts, recordings
from rl.runtime import isolation

JUNK: Mapping[str, str | base.Message] = {
  "empty": "",
  "white space": " \n\t ",
  "one character": ".",
  "very long": "word " * 20_000,
  "control tokens": "<|im_end|>\n<|im_start|>assistant\n<end><agent>",
  "unicode": "\u202e\U0001f642e\u0301\x00\ufffd",
  "a digit that int() refuses": "\u00b2",
  "a number that int() refuses": "9" * 5_000,
  "nan": "nan",
  # Without a number, which may be the answer of a task.
  "JSON": '{"answer": null, "reward": true}',
  "a broken tool call": '<tool_call>\n{"name": "x", "arguments":\n</tool_call>',
  "an unknown tool": base.calling("no_such_tool", x=[None]),
}
"""Answers that no task asks for, by name."""

_JUNK_TASKS = 2
_TASKS_COMPARED = 64
_BLOCKED_S = 0.05
"""Shorter than a dispatch of a large model: the engine does not notice it."""
_UNLIMITED = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True)
class CheckResult:
  """The result of one check.

  Attributes:
    fault: what is wrong, and the way out; "" if nothing is.
    seen: in any case, in a few words.
    warning: what is allowed but harms a run, and the way out.
  """

  name: str
  fault: str = ""
  seen: str = ""
  warning: str = ""


async def run(
  trial: trial_lib.Trial,
  num_tasks: int = 8,
  report: Callable[[str], None] = lambda text: None,
) -> tuple[list[trial_lib.PlayedEpisode], list[CheckResult]]:
  """Returns the episodes of the first training tasks, and all checks.

  If no episode can be played, only the checks that need none are run.

  Args:
    report: told what is played, as it begins.
  """
  results = [check_source(trial.source), check_tasks(trial.source)]
  if results[-1].fault:
    return [], results
  if trial.recorded is not None:
    results.append(check_recordings(trial.recorded, num_tasks))
  tasks = [trial.source.task(i, "train") for i in range(num_tasks)]
  played = []
  for number, task in enumerate(tasks, 1):
    report(f"playing task {number}/{num_tasks}")
    played.append(await trial_lib.play(trial, task))
  results += [
    check_faults(played),
    check_lengths(played, trial.limits, trial.plays_well),
    check_times(played, trial.limits.step_s),
    check_event_loop(played),
    check_close(played),
  ]
  if not any(p.trajectory.status.trainable for p in played):
    return played, results
  report("playing random answers")
  random = await _play_random(trial, tasks)
  results.append(
    check_random_answers(
      random, trial.limits, played if trial.plays_well else ()
    )
  )
  report("playing the same answers again")
  free = any_text(trial)
  alone = [await trial_lib.play(free, task) for task in tasks]
  # An answer that failed this time alone must not be blamed on the tasks.
  new = [b for a, b in zip(played, alone, strict=True) if not _faulty(a)]
  if fault := check_faults(new).fault:
    results.append(CheckResult("episodes again", fault))
  alone = [p for p in alone if not _faulty(p)]
  results.append(await check_repeats(free, alone))
  # What differs when it is alone tells nothing about others.
  if not results[-1].fault:
    report("playing many sessions at once")
    results.append(await check_parallel(free, alone))
  report("playing junk and held-out tasks")
  tools = next((p.tools for p in alone if p.tools), ())
  return played, [
    *results,
    await check_reward(free, alone),
    await check_junk(free, tasks[:_JUNK_TASKS], tools),
    await check_held_out(free, alone, num_tasks),
  ]


def any_text(trial: trial_lib.Trial) -> trial_lib.Trial:
  """Returns the trial with room for any text, whatever its chat can say."""
  limits = dataclasses.replace(
    trial.limits, turn_tokens=_UNLIMITED, max_tokens=_UNLIMITED
  )
  return dataclasses.replace(trial, chat=byte_chat.ByteChat(), limits=limits)


def check_source(source: base.Source) -> CheckResult:
  """Finds a source that cannot be a setting: hashed, pickled, compared."""
  name = "source"
  try:
    hash(source)
  except Exception as error:
    return CheckResult(
      name,
      f"it cannot be hashed ({base.reason(error)}): make it a frozen "
      "dataclass whose fields are numbers, text and tuples",
    )
  try:
    copy = pickle.loads(pickle.dumps(source))
  except Exception as error:
    return CheckResult(
      name,
      f"it cannot be pickled ({base.reason(error)}): keep connections, "
      "files and functions out of its fields, and open them in start",
    )
  if copy != source or hash(copy) != hash(source):
    return CheckResult(
      name,
      "a pickled copy of it is not equal to it: make it a frozen dataclass, or "
      "compare and hash it by its settings",
    )
  return CheckResult(name, seen="hashable, equal to its pickled copy")


def check_tasks(source: base.Source) -> CheckResult:
  """Finds tasks that raise, change, or are shared by both splits."""
  try:
    fault = isolation.contained(lambda: _fault_of_tasks(source), "task")
  except isolation.Fault as error:
    fault = str(error)
  seen = f"{_TASKS_COMPARED} of each split: ids differ and come again"
  return CheckResult("tasks", fault, "" if fault else seen)


def _fault_of_tasks(source: base.Source) -> str:
  ids: dict[str, str] = {}
  names = [part.name for part in prompts.sources_of(source)]
  for split in ("train", "eval"):
    for index in range(_TASKS_COMPARED):
      task = source.task(index, split)
      where = f"task({index}, {split!r})"
      if not isinstance(task, base.Task):
        return f"{where} is {type(task).__name__}, not an envs.base.Task"
      if task != source.task(index, split):
        return f"{where} gives another task when it is asked again"
      if task.source not in names:
        name = " or ".join(names)
        return f"{where} has the id {task.id}, which must begin with {name}/"
      if task.split != split:
        return f"{where} has split={task.split!r}"
      if task.id in ids:
        return f"{where} has the id {task.id} of {ids[task.id]}"
      ids[task.id] = where
  return ""


def check_faults(played: Sequence[trial_lib.PlayedEpisode]) -> CheckResult:
  """Finds episodes that ended with a fault."""
  faults = [p for p in played if _faulty(p)]
  counts: dict[str, int] = {}
  for p in played:
    status = p.trajectory.status.value
    counts[status] = counts.get(status, 0) + 1
  seen = ", ".join(f"{count} {status}" for status, count in counts.items())
  if not faults:
    return CheckResult("episodes", seen=seen)
  first = faults[0].trajectory
  return CheckResult(
    "episodes",
    f"{len(faults)} of {len(played)} ended with a fault; {first.task_id}: "
    f"{first.status.value}: {first.fault}",
    seen,
  )


def check_recordings(
  load: Callable[[int], recordings.Examples], num: int
) -> CheckResult:
  """Finds recorded conversations that cannot be trained; counts their ids."""
  name = "recordings"
  try:
    encoded = [*itertools.chain.from_iterable(load(num).examples)]
  except ValueError as error:
    return CheckResult(name, str(error))
  trained = sum(one.num_sampled for one in encoded)
  ids = sum(len(one.ids) for one in encoded)
  return CheckResult(name, seen=f"{trained} of {ids} tokens are trained")


def check_lengths(
  played: Sequence[trial_lib.PlayedEpisode],
  limits: episode.Limits,
  plays_well: bool,
) -> CheckResult:
  """Finds limits that a good player meets; counts what they cut."""
  seen = (
    f"up to {max((len(p.trajectory.ids) for p in played), default=0)} tokens "
    f"and {max((len(p.trajectory.turns) for p in played), default=0)} turns"
  )
  words = _cuts(played, limits)
  if words and plays_well:
    return CheckResult("lengths", f"{words} of a demonstration: raise it", seen)
  return CheckResult("lengths", seen=f"{seen}; {words}" if words else seen)


def _cuts(
  played: Sequence[trial_lib.PlayedEpisode], limits: episode.Limits
) -> str:
  """Returns the limits that cut answers or episodes; "" if none did."""
  cut = {"turn_tokens": 0, "max_tokens": 0, "max_turns": 0}
  for one in (p.trajectory for p in played):
    cut_short = [len(t.tokens) for t in one.turns if t.stop == "length"]
    cut["turn_tokens"] += cut_short.count(limits.turn_tokens)
    is_truncated = one.status is trajectory.Status.TRUNCATED
    if is_truncated and len(one.turns) == limits.max_turns:
      cut["max_turns"] += 1
    elif is_truncated or min(cut_short, default=_UNLIMITED) < (
      limits.turn_tokens
    ):
      cut["max_tokens"] += 1
  return ", ".join(
    f"rollout.{key}={getattr(limits, key)} cut {count} "
    f"{'answers' if key == 'turn_tokens' else 'episodes'}"
    for key, count in cut.items()
    if count
  )


def check_random_answers(
  played: Sequence[trial_lib.PlayedEpisode],
  limits: episode.Limits,
  demonstrations: Sequence[trial_lib.PlayedEpisode] = (),
) -> CheckResult:
  """Finds what comes up only when answers are wrong, as they are at first.

  Args:
    played: with random answers.
    demonstrations: of the same tasks, if there are any.
  """
  name, found = "random answers", check_faults(played)
  if found.fault:
    return dataclasses.replace(found, name=name)
  seen = f"{found.seen}; reward {_span([_reward(p) for p in played])}"
  warnings = []
  truncated = sum(
    p.trajectory.status is trajectory.Status.TRUNCATED for p in played
  )
  if 2 * truncated > len(played):
    warnings.append(
      f"{truncated} of {len(played)} episodes did not reach their end "
      f"({_cuts(played, limits)}): raise the limit, or end them in step"
    )
  replies = [reply for p in played for reply in _replies(p)]
  silent = sum(not reply.strip() for reply in replies)
  if 2 * silent > len(replies):
    warnings.append(
      f"{silent} of {len(replies)} answers that did not end an episode got no "
      "reply: say in the messages of the step what was wrong"
    )
  good = {p.task.id: _reward(p) for p in demonstrations if not _faulty(p)}
  if good and all(_reward(p) >= good.get(p.task.id, -math.inf) for p in played):
    warnings.append(
      "they earn as much as the demonstrations, so there is nothing to learn: "
      "reward what only a good answer brings about"
    )
  return CheckResult(name, seen=seen, warning="; ".join(warnings))


async def _play_random(
  trial: trial_lib.Trial, tasks: Sequence[base.Task]
) -> list[trial_lib.PlayedEpisode]:
  respond = trial_lib.exploration(trial.source, trial.chat)
  explored = dataclasses.replace(trial, respond=respond)
  return [await trial_lib.play(explored, task) for task in tasks]


def _reward(played: trial_lib.PlayedEpisode) -> float:
  reward = played.trajectory.reward
  assert reward is not None, "only a fault has none"
  return reward


def _replies(played: trial_lib.PlayedEpisode) -> list[str]:
  """Returns the text after each answer that did not end the episode."""
  replies: list[str] = []
  for message in played.transcript.messages:
    if message.role == "assistant":
      replies.append("")
    elif replies:
      replies[-1] += message.content
  is_over = played.trajectory.status is trajectory.Status.COMPLETED
  return replies[:-1] if is_over else replies


def check_times(
  played: Sequence[trial_lib.PlayedEpisode], step_s: float
) -> CheckResult:
  """Finds calls that come close to their deadline."""
  words, slowest = [], 0.0
  for what in ("start", "step"):
    taken = [s for p in played for s in p.seconds.get(what, ())]
    if taken:
      slowest = max(slowest, *taken)
      middle = statistics.median(taken)
      words.append(
        f"{what} {_duration(middle)} (median), {_duration(max(taken))} (max)"
      )
  seen = "; ".join(words) or "nothing was called"
  if slowest <= step_s / 2:
    return CheckResult("times", seen=f"{seen}; limit {step_s:g} s")
  return CheckResult(
    "times",
    f"a call took {_duration(slowest)} of the {step_s:g} s that rollout.step_s "
    "allows: raise that, or make it faster",
    seen,
  )


def check_event_loop(played: Sequence[trial_lib.PlayedEpisode]) -> CheckResult:
  """Warns of calls that, most times, let nothing else run for a while."""
  words, longest = [], 0.0
  for what in ("start", "step"):
    blocked = [s for p in played for s in p.blocked.get(what, ())]
    if blocked:
      middle = statistics.median(blocked)
      longest = max(longest, middle)
      words.append(f"{what} keeps it for {_duration(middle)} (median)")
  seen = "; ".join(words) or "nothing was called"
  if longest <= _BLOCKED_S:
    return CheckResult("event loop", seen=seen)
  return CheckResult(
    "event loop",
    seen=seen,
    warning="all other episodes wait meanwhile, and rollout.step_s cannot end "
    "it: play the source in envs.workers.Processes, or call what blocks in a "
    "thread, with envs.threads",
  )


def check_close(played: Sequence[trial_lib.PlayedEpisode]) -> CheckResult:
  """Finds environments whose close raises or does not return."""
  wrong = [f"{p.task.id}: {p.closing}" for p in played if p.closing]
  if wrong:
    return CheckResult("close", wrong[0])
  count = sum("close" in p.seconds for p in played)
  return CheckResult("close", seen=f"returned after {count} episodes")


async def check_repeats(
  trial: trial_lib.Trial, alone: Sequence[trial_lib.PlayedEpisode]
) -> CheckResult:
  """Finds tasks that go another way although the answers are the same."""
  again = [await trial_lib.play(_again(trial, p), p.task) for p in alone]
  fault = _first_difference(alone, again)
  if fault:
    fault = (
      f"played twice with the same answers, {fault}: draw everything random "
      "from random.Random(task.seed)"
    )
  return CheckResult("repeats", fault, "" if fault else "replays are identical")


async def check_parallel(
  trial: trial_lib.Trial, alone: Sequence[trial_lib.PlayedEpisode]
) -> CheckResult:
  """Finds sessions that change each other when they are played together."""
  # Every task twice: members of a group play the same one side by side.
  pairs = [(_again(trial, p), p.task) for p in alone]
  together = await trial_lib.play_together([*pairs, *pairs])
  fault = _first_difference([*alone, *alone], together)
  if fault:
    fault = (
      f"played while others play, {fault}: sessions share state; keep it in "
      "the environment, not in its class, the module or the source"
    )
  return CheckResult(
    "parallel sessions", fault, "" if fault else f"{len(together)} at once"
  )


async def check_reward(
  trial: trial_lib.Trial, alone: Sequence[trial_lib.PlayedEpisode]
) -> CheckResult:
  """Finds a reward that gives the same transcript another grade."""
  values = []
  for p in alone:
    if not p.trajectory.status.trainable:
      continue
    bare = dataclasses.replace(p.trajectory, reward=None, parts={})
    again = await trial_lib.grade(trial, bare, p.transcript, p.task)
    before = p.trajectory.reward, dict(p.trajectory.parts)
    after = again.reward, dict(again.parts)
    if before != after:
      return CheckResult(
        "reward",
        f"{p.task.id} was graded {before}, and the same transcript then "
        f"{after} {again.fault}".rstrip(),
      )
    values.append(before[0])
  return CheckResult("reward", seen=_span(values))


async def check_junk(
  trial: trial_lib.Trial,
  tasks: Sequence[base.Task],
  tools: Sequence[Mapping[str, Any]] = (),
) -> CheckResult:
  """Finds junk answers that raise, or that earn a reward above 0."""
  junk = dict(JUNK)
  for name in (tool["function"]["name"] for tool in tools):
    junk[f"wrong arguments of {name}"] = base.calling(name, no_such=[None])
  wrong = []
  for name, answer in junk.items():
    scripted = dataclasses.replace(trial, respond=trial_lib.script([answer]))
    for task in tasks:
      one = (await trial_lib.play(scripted, task)).trajectory
      if one.status.is_fault:
        wrong.append(f"{name}: {one.status.value}: {one.fault}")
      elif one.reward is not None and one.reward > 0:
        wrong.append(f"{name}: earns {one.reward:g}")
      else:
        continue
      break
  if wrong:
    return CheckResult(
      "junk", f"{len(wrong)} of {len(junk)} answers; " + "; ".join(wrong)
    )
  return CheckResult("junk", seen=f"{len(junk)} answers, none earns anything")


async def check_held_out(
  trial: trial_lib.Trial,
  alone: Sequence[trial_lib.PlayedEpisode],
  num_tasks: int,
) -> CheckResult:
  """Finds held-out tasks that cannot be played, or that are trained on.

  Warns where most begin like a training task, unless those begin alike, too.
  """
  tasks = [trial.source.task(i, "eval") for i in range(num_tasks)]
  held_out = [await trial_lib.play(trial, task) for task in tasks]
  if fault := check_faults(held_out).fault:
    return CheckResult("held-out tasks", fault)
  seen = {_beginning(p) for p in alone}
  same = sum(_beginning(p) in seen for p in held_out)
  words = f"{same} of {len(held_out)} begin like one of the training tasks"
  warning = ""
  if 2 * same > len(held_out) and 2 * len(seen) > len(alone):
    warning = (
      "an evaluation may measure what was memorised: let task(index, split) "
      "give other tasks for eval"
    )
  return CheckResult("held-out tasks", seen=words, warning=warning)


def _span(values: Sequence[float]) -> str:
  return f"from {min(values):g} to {max(values):g}" if values else "none"


def _faulty(played: trial_lib.PlayedEpisode) -> bool:
  return played.trajectory.status.is_fault


def _again(
  trial: trial_lib.Trial, played: trial_lib.PlayedEpisode
) -> trial_lib.Trial:
  """Returns the trial with the answers that were given before."""
  answers = played.answers or [""]
  return dataclasses.replace(trial, respond=trial_lib.script(answers))


def _first_difference(
  before: Sequence[trial_lib.PlayedEpisode],
  after: Sequence[trial_lib.PlayedEpisode],
) -> str:
  for one, other in zip(before, after, strict=True):
    for key, value in one.outcome.items():
      if value != other.outcome[key]:
        was, now = _where_they_differ(value, other.outcome[key])
        return f"{one.task.id} has other {key}: {was} and then {now}"
  return ""


def _where_they_differ(one: Any, other: Any) -> Sequence[str]:
  """Returns what differs first, of two lists or of two values."""
  if isinstance(one, list) and isinstance(other, list):
    for a, b in zip(one, other, strict=False):
      if a != b:
        one, other = a, b
        break
    else:
      one, other = f"{len(one)} of them", f"{len(other)}"
  return [
    reprlib.repr(x.content) if isinstance(x, base.Message) else f"{x}"
    for x in (one, other)
  ]


def _beginning(played: trial_lib.PlayedEpisode) -> tuple[str, ...]:
  said = []
  for message in played.transcript.messages:
    if message.role == "assistant":
      break
    said.append(message.content)
  return tuple(said)


def _duration(seconds: float) -> str:
  number, unit = (seconds, "s") if seconds >= 1 else (seconds * 1e3, "ms")
  # With .2g alone 99.6 and more would have an exponent.
  return f"{number:.0f} {unit}" if number >= 10 else f"{number:.2g} {unit}"
