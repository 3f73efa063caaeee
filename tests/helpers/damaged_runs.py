"""Ways in which the directory of a run is damaged."""

import os
import pathlib
import shutil
from collections.abc import Callable

from rl.rollout import chats

Damage = Callable[[pathlib.Path], None]


def _pipe(name: str) -> Damage:
  def damage(run: pathlib.Path) -> None:
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)

  return damage


def _directory(name: str) -> Damage:
  def damage(run: pathlib.Path) -> None:
    (run / name).unlink(missing_ok=True)
    (run / name).mkdir()

  return damage


def _file(name: str) -> Damage:
  def damage(run: pathlib.Path) -> None:
    shutil.rmtree(run / name, ignore_errors=True)
    (run / name).write_text("not a directory")

  return damage


def _loop(name: str) -> Damage:
  def damage(run: pathlib.Path) -> None:
    path = run / name
    if path.is_dir():
      shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(name)

  return damage


def _bytes(name: str, line: bytes, start: bool = False) -> Damage:
  """Puts a line into the middle of a file, or to its start."""

  def damage(run: pathlib.Path) -> None:
    lines = (run / name).read_bytes().splitlines(keepends=True)
    lines.insert(0 if start else len(lines) // 2, line + b"\n")
    (run / name).write_bytes(b"".join(lines))

  return damage


def _content(name: str, content: bytes) -> Damage:
  def damage(run: pathlib.Path) -> None:
    (run / name).write_bytes(content)

  return damage


def _step(name: str) -> Damage:
  """Adds a directory beside the checkpoints."""
  return lambda run: (run / "checkpoints" / name).mkdir()


def _step_file(name: str) -> Damage:
  def damage(run: pathlib.Path) -> None:
    (run / "checkpoints" / name).write_text("")

  return damage


def _step_loop(run: pathlib.Path) -> None:
  (run / "checkpoints" / "99").symlink_to("99")


RECORDS = ("metrics.jsonl", "evaluations.jsonl", "events.jsonl", "spans.jsonl")
OTHERS = ("logprob_gap.jsonl", "report.html", "trace.json", ".status")
TREES = ("trajectories", "tensorboard", "skipped", "checkpoints", chats.KEPT)

DAMAGES: dict[str, Damage] = {
  **{
    f"{name}: {kind}": make(name)
    for name in (*RECORDS, *OTHERS, ".lock", "config.json")
    for kind, make in (
      ("a pipe", _pipe),
      ("a directory", _directory),
      ("a link to itself", _loop),
    )
  },
  **{
    f"{name}: {kind}": make(name)
    for name in TREES
    for kind, make in (("a file", _file), ("a link to itself", _loop))
  },
  **{
    f"{name}: {kind}": _bytes(name, line, start)
    for name in RECORDS
    for start in (False, True)
    for kind, line in (
      (f"a line not UTF-8{' first' * start}", b'{"round": 1\xff}'),
      (f"a null line{' first' * start}", b"null"),
      (f"a deep line{' first' * start}", b"[" * 100_000),
      (f"a row of text{' first' * start}", b'{"round": "1", "kind": 1}'),
    )
  },
  "config.json: not UTF-8": _content("config.json", b'{"class": "\xff"}'),
  "config.json: null": _content("config.json", b"null"),
  "config.json: a list": _content("config.json", b"[1]"),
  "config.json: empty": _content("config.json", b""),
  "config.json: deep": _content("config.json", b"[" * 100_000),
  ".status: not UTF-8": _content(".status", b"\xff"),
  ".status: null": _content(".status", b"null"),
  "a step with a unicode digit": _step("٣"),
  "a step with a superscript": _step("²"),
  "a step with a sign": _step("-1"),
  "a step with zeros": _step("007"),
  "a step beyond all numbers": _step("9" * 30),
  "a step that is a file": _step_file("98"),
  "a step that links to itself": _step_loop,
  "an empty step": _step("97"),
}
