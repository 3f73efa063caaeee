"""The chat of a run: its environment's words, or the tokenizer of a model."""

import dataclasses
import json
import os
import pathlib
import shutil

from envs import base
from models.chat import hf_chat, word_chat
from models.hf import tokenizer_files
from rl.rollout import episode

KEPT = "tokenizer"
"""Directory of a run: the tokenizer it trains with."""


@dataclasses.dataclass(frozen=True)
class Words:
  """One id for each word of the environment; a model learns them anew."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hf:
  """The tokenizer, chat template and stop ids of a Hugging Face directory.

  Attributes:
    directory: None takes that of `initial`.
    thinking: the template's `enable_thinking`; None leaves it to the template.
  """

  directory: str | None = None
  thinking: bool | None = None

  def load(self, directory: str | os.PathLike[str]) -> hf_chat.HfChat:
    """Returns the chat of a directory; raises ValueError without one."""
    is_set = self.thinking is not None
    variables = {"enable_thinking": self.thinking} if is_set else {}
    return hf_chat.HfChat.load(directory, variables)


ChatSetting = Words | Hf


def choose(chat: ChatSetting | None, initial: str | None) -> ChatSetting:
  """Returns the chat of a run: that of `initial` where none is set.

  A model that knows no more than a list of words says the words of the
  environment.
  """
  if chat is None:
    listed = initial is None or tokenizer_files.lists_words(initial)
    chat = Words() if listed else Hf()
  if isinstance(chat, Hf) and chat.directory is None:
    chat = dataclasses.replace(chat, directory=initial)
  return chat


def build(
  chat: ChatSetting, source: base.Source, run_dir: pathlib.Path | None
) -> episode.Chat:
  """Returns the chat of a run.

  Args:
    chat: as chosen.
    run_dir: the tokenizer that it keeps comes first.

  Raises:
    ValueError: files are missing or broken, or the source lists no words.
  """
  # What the run began with may be gone, and then the choice is another.
  if run_dir is not None and (run_dir / KEPT).is_dir():
    return (chat if isinstance(chat, Hf) else Hf()).load(run_dir / KEPT)
  if isinstance(chat, Words):
    return word_chat.WordChat(tuple(base.words(source)))
  return chat.load(_directory(chat))


def keep(chat: ChatSetting, run_dir: pathlib.Path) -> None:
  """Copies the tokenizer of a run into its directory, once.

  Raises:
    ValueError: there is none to copy.
  """
  if isinstance(chat, Words) or (run_dir / KEPT).is_dir():
    return
  partial = run_dir / f"{KEPT}.partial"
  shutil.rmtree(partial, ignore_errors=True)
  partial.mkdir()
  ids = tokenizer_files.copy(_directory(chat), partial)
  (partial / "config.json").write_text(json.dumps(ids))
  partial.rename(run_dir / KEPT)


def _directory(chat: Hf) -> str:
  if chat.directory is None:
    raise ValueError(
      "chat=hf has no tokenizer: name the directory of a model, by initial or "
      "as chat=hf(directory='DIR')"
    )
  return chat.directory
