"""Tries what is hostile, and keeps what came of it: python -m scripts.hostile.

  python -m scripts.hostile [--rooms=server,files] [--trials=8]

  server  requests that are large or deep, at a context of 131,072 tokens; how
          long others waited meanwhile, who ask /health without a pause
  files   the directory of a run, damaged in each way of
          tests/helpers/damaged_runs.py: shown by the report, and claimed to go
          on
  kills   trials of scripts/soak.py from the first on, as many as --trials, a
          minute or more each, --jobs at once; each is printed when it is over
  roles   as many for each kind of process, killed or stopped, in flight, each
          --times
  disks   runs on disks of a few sizes that fill up; takes bubblewrap

Writes benchmarks/results/hostile.json, of which `scripts.make_docs` makes the
tables of docs/guides/hostile.md. Rooms that are left out keep their results;
with --more, kills and roles add trials to theirs. Others on the machine add to
the waits.
"""

import collections
import contextlib
import dataclasses
import gc
import http.client
import json
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from typing import Any

from absl import app, flags

from benchmarks import machine
from launch.cli import flags as config_flags
from launch.cli import workdir
from launch.report import page
from launch.run import metrics_writer, status_server
from rl.settings import annotations
from tests.helpers import commands, damaged_runs, openai_server, processes

_ROOMS = flags.DEFINE_list("rooms", ["server", "files"], "Rooms to try.")
_TRIALS = flags.DEFINE_integer("trials", 8, "Of kills, and of each role.", 1)
_JOBS = flags.DEFINE_integer("jobs", 1, "Trials at once.", 1)
_TIMES = flags.DEFINE_integer("times", 1, "Losses in a trial of roles.", 1)
_MORE = flags.DEFINE_bool("more", False, "Adds trials to those that are kept.")

_RESULT = commands.ROOT / "benchmarks" / "results" / "hostile.json"
_LENGTH = 131_072
_REPEATS = 3
_LATE_S = 20
_SHOWN = ("done", "refused")
Row = Mapping[str, Any]


def main(_: list[str]) -> None:
  """Tries the rooms in turn, prints each row and keeps them all."""
  kept = json.loads(_RESULT.read_text()) if _RESULT.exists() else {}
  known = {
    "server": server,
    "files": files,
    "kills": lambda: kills(kept.get("kills", []) * _MORE.value),
    "roles": lambda: roles(kept.get("roles", []) * _MORE.value),
    "disks": disks,
  }
  rooms = {name: kept.get(name, []) for name in known}
  for name in _ROOMS.value:
    if name not in known:
      raise app.UsageError(f"--rooms={name}: use {', '.join(known)}")
    rooms[name] = []
    for row in known[name]():
      print(name, *(f"{key}={value}" for key, value in row.items()), flush=True)
      rooms[name].append(row)
    machine.keep("hostile", **rooms)


# The server.


def server() -> Iterator[Row]:
  """Yields what each request got, and how long others waited."""
  with _server() as port:
    for name, path, body in _requests():
      waits, replies = [], list[tuple[int, float]]()
      for _ in range(_REPEATS):
        wait_ms, reply = _asked(port, path, json.dumps(body).encode())
        waits.append(wait_ms)
        replies.append(reply)
      yield {
        "request": name,
        "status": replies[-1][0],
        "took_s": statistics.median(took_s for _, took_s in replies),
        "others_ms": statistics.median(waits),
        "worst_ms": max(waits),
      }


def _requests() -> Iterator[tuple[str, str, Any]]:
  chat, text = "/v1/chat/completions", "/v1/completions"

  def said(content: str) -> Any:
    message = {"role": "user", "content": content}
    return {"model": "any", "max_tokens": 4, "messages": [message]}

  most = 2_700_000  # Characters; this tokenizer's longest token has 21.
  yield "none", "/health", {}
  yield "a text of 72,000 tokens", chat, said("word by word, " * 9_000)
  yield "2.7 million letters", chat, said("abcdefghi " * (most // 10))
  yield "2.7 million spaces", chat, said(" " * most)
  yield (
    "2.7 million characters of control tokens",
    chat,
    said("<|im_start|>" * (most // 12)),
  )
  yield "2.7 million escapes", chat, said("\n" * most)
  yield (
    "the ids of 2.7 million letters",
    "/tokenize",
    {"prompt": "abcdefghi " * (most // 10)},
  )
  yield (
    "131,000 ids",
    text,
    {
      "model": "any",
      "max_tokens": 4,
      "prompt": [65] * 131_000,
    },
  )
  yield "the text of 131,000 ids", "/detokenize", {"tokens": [65] * 131_000}
  yield (
    "4,096 messages",
    chat,
    said("go") | {"messages": 4096 * [{"role": "user", "content": "go"}]},
  )
  yield "150,000 values", text, {"prompt": "go", "x": [{}] * 149_000}
  yield "20 MB", chat, said("a" * 20_000_000)


def _asked(port: int, path: str, body: bytes) -> tuple[float, Any]:
  """Returns the longest wait of others, in ms, and (status, seconds)."""
  replies: list[tuple[int, float]] = []

  def ask() -> None:
    began_s = time.perf_counter()
    with contextlib.closing(_connected(port)) as link:
      method = "GET" if path == "/health" else "POST"
      link.request(method, path, body, {"content-type": "application/json"})
      reply = link.getresponse()
      reply.read()
    replies.append((reply.status, time.perf_counter() - began_s))

  asking = threading.Thread(target=ask)
  worst_s = 0.0
  with contextlib.closing(_connected(port)) as link:
    asking.start()
    until_s = time.perf_counter() + 0.3
    while asking.is_alive() or time.perf_counter() < until_s:
      began_s = time.perf_counter()
      link.request("GET", "/health")
      link.getresponse().read()
      worst_s = max(worst_s, time.perf_counter() - began_s)
      time.sleep(0.002)
  asking.join()
  return 1000 * worst_s, replies[0]


def _connected(port: int) -> http.client.HTTPConnection:
  return http.client.HTTPConnection("127.0.0.1", port, timeout=300)


@contextlib.contextmanager
def _server() -> Iterator[int]:
  """Yields the port of a server in a process of its own."""
  program = "from scripts import hostile; hostile.serve()"
  with subprocess.Popen(
    [sys.executable, "-c", program],
    cwd=commands.ROOT,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  ) as process:
    assert process.stdin
    assert process.stdout
    try:
      yield int(process.stdout.readline())
    finally:
      process.stdin.close()


def serve() -> None:
  """Serves a scripted engine with a chat template until stdin ends."""
  with openai_server.serve(openai_server.HF, max_length=_LENGTH) as served:
    able = served.engine.capabilities
    served.engine.capabilities = dataclasses.replace(able, max_length=_LENGTH)
    gc.collect()  # As launch.serve does.
    gc.freeze()
    print(served.address.rsplit(":", 1)[1], flush=True)
    sys.stdin.read()


# Files.


def files() -> Iterator[Row]:
  """Yields what became of each kind of damage."""
  experiment = config_flags.load(commands.CONFIG)
  kinds: dict[str, collections.Counter[str]] = {}
  with tempfile.TemporaryDirectory() as directory:
    whole = pathlib.Path(directory, "whole")
    _make_run(whole, experiment)
    for name, damage in damaged_runs.DAMAGES.items():
      place, _, kind = name.partition(": ")
      kind = kind or "a checkpoint of a wrong name or kind"
      counts = kinds.setdefault(kind, collections.Counter())
      run = pathlib.Path(directory, "run")
      shutil.copytree(whole, run)
      damage(run)
      asked = _outcome(status_server.ask, run)  # No process answers.
      counts["shown"] += (_outcome(page.write, run), asked) == _SHOWN
      outcome = _outcome(_claim, run, experiment)
      if outcome == "done":
        is_moved = any(run.glob("*.damaged*"))
        outcome = "moved aside" if is_moved else "left as it is"
      counts[outcome] += 1
      if outcome.startswith(("hung", "raised")):
        print(f"{place}: {kind}: {outcome}", file=sys.stderr)
      shutil.rmtree(run)
  for kind, counts in kinds.items():
    yield {"damage": kind, "outcomes": dict(counts)}


def _make_run(run: pathlib.Path, experiment: Any) -> None:
  workdir.claim(run, experiment).close()
  for name in damaged_runs.RECORDS:
    (run / name).write_text('{"round": 1, "kind": "round", "t": 1.0}\n' * 3)
  for name in ("checkpoints/3", "trajectories", "tensorboard"):
    (run / name).mkdir(parents=True)


def _claim(run: pathlib.Path, experiment: Any) -> None:
  with workdir.claim(run, experiment):
    metrics_writer.MetricsWriter(run, first_round=4).close()


def _outcome(work: Callable[..., Any], *given: Any) -> str:
  """Returns "done", "refused", "raised" with the error, or "hung"."""

  def late(number: int, frame: Any) -> None:
    del number, frame
    raise _Late

  before = signal.signal(signal.SIGALRM, late)
  signal.alarm(_LATE_S)
  try:
    work(*given)
  except _Late:
    return "hung"
  except (annotations.SettingError, ConnectionError, FileNotFoundError):
    return "refused"
  except Exception as error:
    return f"raised {error!r:.80}"
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
  return "done"


class _Late(BaseException):
  """The work took too long."""


# Kills and disks.


def kills(before: Iterable[Row]) -> Iterator[Row]:
  """Yields the trials of each way to hurt a run, and those it survived."""
  yield from _by_way(before, 1)


def roles(before: Iterable[Row]) -> Iterator[Row]:
  """Yields them of each kind of process, under the schedule in flight."""
  for role in (*processes.ROLES, "run"):
    kept = [row for row in before if row["role"] == role]
    times = _TIMES.value
    role_flags = (f"--role={role}", "--schedule=in_flight", f"--times={times}")
    for row in _by_way(kept, times, *role_flags):
      yield {"role": role, **row}


def _by_way(
  before: Iterable[Row], times: int, *arguments: str
) -> Iterator[Row]:
  """Makes trials beyond those of before; yields a row for each way to hurt."""
  tried = collections.Counter({row["way"]: row["tried"] for row in before})
  survived = collections.Counter(
    {row["way"]: row["survived"] for row in before}
  )

  def trial(number: int) -> str:
    command = (sys.executable, "-m", "scripts.soak", f"--only={number}")
    done = subprocess.run(
      (*command, *arguments),
      cwd=commands.ROOT,
      stdout=subprocess.PIPE,
      text=True,
      check=False,
    )
    print(done.stdout, end="", flush=True)
    return done.stdout

  first = tried.total()
  with futures.ThreadPoolExecutor(_JOBS.value) as pool:
    for text in pool.map(trial, range(first, first + _TRIALS.value)):
      found = re.search(r"(\w+) +[\d.]+ s", text)
      way = "repeatable" if "repeatable," in text else found and found[1]
      way = f"{way}{', into its report' * ('into its report' in text)}"
      tried[way] += times
      survived[way] += times * (" survived, " in text)
  for way, count in sorted(tried.items()):
    yield {"way": way, "tried": count, "survived": survived[way]}


def disks() -> Iterator[Row]:
  """Yields how many runs survived a disk that filled up."""
  done = subprocess.run(
    [sys.executable, "-m", "pytest", "-q", "tests/claims/test_full_disk.py"],
    cwd=commands.ROOT,
    stdout=subprocess.PIPE,
    text=True,
    check=False,
  )
  counts = {
    kind: int(number)
    for number, kind in re.findall(r"(\d+) (passed|failed)", done.stdout)
  }
  survived, failed = counts.get("passed", 0), counts.get("failed", 0)
  if survived + failed:
    way = "a disk that fills up, and has room again"
    yield {"way": way, "tried": survived + failed, "survived": survived}


if __name__ == "__main__":
  app.run(main)
