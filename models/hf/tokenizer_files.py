"""The tokenizer and chat template of a model, as files of transformers.

Our own tokenizers are written out so that AutoTokenizer gives the ids that
`chat` gives; those of a checkpoint are copied as they are.
"""

import json
import os
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

from models import untrusted_files
from models.chat import word_chat

_FILES = (
  "tokenizer.json",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "added_tokens.json",
  "vocab.json",
  "merges.txt",
  "tokenizer.model",
  "chat_template.jinja",
  "chat_template.json",
  "generation_config.json",
)
_KINDS = ("tokenizer.json", "vocab.json", "tokenizer.model")
_TREES = ("additional_chat_templates",)
_MAX_IDS = 1 << 24
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

# As WordChat's, special tokens are not words: text cannot end a turn.
_TEMPLATE = """\
{%- for message in messages -%}
{%- for token in SPECIAL -%}
{%- if token in message.content -%}
{{- raise_exception('a message holds the special token ' ~ token) -}}
{%- endif -%}
{%- endfor -%}
{%- if message.role == 'assistant' -%}
{{- 'AGENT ' ~ message.content ~ ' END ' -}}
{%- else -%}
{{- message.content ~ ' ' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- 'AGENT' -}}
{%- endif -%}
"""


def copy(
  source: str | os.PathLike[str],
  directory: str | os.PathLike[str],
  stop_ids: Sequence[int] = (),
) -> dict[str, Any]:
  """Copies a checkpoint's tokenizer, chat template and generation settings.

  Args:
    stop_ids: end an answer; the copy's settings name those that are missing.

  Returns:
    The special ids of its config.json, which belong into the copy's.

  Raises:
    ValueError: the source has no tokenizer.
  """
  found = [name for name in _FILES if pathlib.Path(source, name).is_file()]
  if not set(_FILES[:5]) & set(found):
    raise ValueError(
      f"{source} holds no tokenizer; it has none of {', '.join(_FILES[:5])}"
    )
  for name in found:
    shutil.copyfile(pathlib.Path(source, name), pathlib.Path(directory, name))
  for name in _TREES:
    tree = pathlib.Path(source, name)
    if tree.is_dir():
      shutil.copytree(tree, pathlib.Path(directory, name))
  config = pathlib.Path(source, "config.json")
  data = untrusted_files.read_object(config) if config.exists() else {}
  ids = {name: data[name] for name in _IDS if name in data}
  if stop_ids:
    path = pathlib.Path(directory, "generation_config.json")
    _stop_at(stop_ids, path, ids.get("eos_token_id"))
  return ids


def _stop_at(stop_ids: Sequence[int], path: pathlib.Path, others: Any) -> None:
  """Names ids in generation_config.json, at which transformers stops.

  Args:
    others: ids at which it stops where the file names none.
  """
  settings = untrusted_files.read_object(path) if path.exists() else {}
  found = settings.get("eos_token_id", others)
  known = found if isinstance(found, list) else [found] * (found is not None)
  missing = [i for i in stop_ids if i not in known]
  if missing:
    settings["eos_token_id"] = [*known, *missing]
    path.write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


def num_ids(directory: str | os.PathLike[str]) -> int:
  """Returns one more than the largest id of a tokenizer.json; 0 without one.

  Raises:
    ValueError: the file cannot be read as a tokenizer.
  """
  path = pathlib.Path(directory, "tokenizer.json")
  if not path.exists():
    return 0
  data = _read(path)
  try:
    added = [token["id"] for token in data.get("added_tokens") or ()]
    vocab = data["model"]["vocab"]
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
  except (TypeError, KeyError, AttributeError) as error:
    raise ValueError(
      f"{path} cannot be read as a tokenizer: {error!r}"
    ) from error
  for number in (*added, *ids):
    if type(number) is not int or not 0 <= number < _MAX_IDS:
      raise ValueError(
        f"{path} has the id {number!r}; ids are numbers from 0 below "
        f"{_MAX_IDS:,}, so copy it again"
      )
  return max([-1, *added, *ids]) + 1


def lists_words(directory: str | os.PathLike[str]) -> bool:
  """Returns whether a directory has no tokenizer but a list of words, if any.

  `write` makes such lists.
  """
  if not any(pathlib.Path(directory, name).is_file() for name in _KINDS):
    return True
  return _tokenizer_model(directory).get("type") == "WordLevel"


def is_other(
  chat: word_chat.WordChat, directory: str | os.PathLike[str]
) -> bool:
  """Returns whether a directory has a tokenizer that gives other ids."""
  if not any(pathlib.Path(directory, name).is_file() for name in _KINDS):
    return False
  vocab = _tokenizer_model(directory).get("vocab")
  return vocab != {chat.token(i): i for i in range(chat.vocab_size)}


def _read(path: pathlib.Path) -> dict[str, Any]:
  return untrusted_files.read_object(path, untrusted_files.MAX_TOKENIZER_BYTES)


def _tokenizer_model(directory: str | os.PathLike[str]) -> dict[str, Any]:
  """Returns the model of tokenizer.json; {} if it cannot be read."""
  try:
    model = _read(pathlib.Path(directory, "tokenizer.json"))["model"]
  except (ValueError, KeyError):
    return {}
  return model if isinstance(model, dict) else {}


def write(
  chat: word_chat.WordChat, directory: str | os.PathLike[str]
) -> dict[str, Any]:
  """Writes files from which AutoTokenizer makes an equal tokenizer.

  A conversation whose messages of the role "assistant" are the answers gets
  the ids that `open`, `encode_answer` and `append` emit; the other roles
  leave no trace there either. A word that is not in the list is an error there
  too. Beside the config.json of a Qwen2.5 transformers reads all tokenizers as
  that model's own.

  Returns:
    The special ids for config.json.

  Raises:
    ValueError: a word holds a special token, which would be cut out of it.
  """
  special = [chat.token(i) for i in range(chat.vocab_size - len(chat.words))]
  for word in chat.words:
    inside = next((token for token in special if token in word), None)
    if inside:
      raise ValueError(
        f"word {word!r} holds the special token {inside}; rename it"
      )
  pad, end, agent = (
    chat.token(i) for i in (word_chat.PAD, word_chat.END, word_chat.AGENT)
  )
  ids = {"eos_token_id": word_chat.END, "pad_token_id": word_chat.PAD}
  names = {
    "pad_token": pad,
    "eos_token": end,
    "additional_special_tokens": [agent],
  }
  template = (
    _TEMPLATE.replace("SPECIAL", json.dumps(special))
    .replace("AGENT", agent)
    .replace("END", end)
  )
  files = {
    "tokenizer.json": _word_level((*special, *chat.words), len(special)),
    "tokenizer_config.json": {
      "tokenizer_class": "PreTrainedTokenizerFast",
      "clean_up_tokenization_spaces": False,
      **names,
    },
    "special_tokens_map.json": names,
    "generation_config.json": ids,
  }
  for name, data in files.items():
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    pathlib.Path(directory, name).write_text(text, "utf-8")
  path = pathlib.Path(directory, "chat_template.jinja")
  path.write_text(template, "utf-8")
  return ids


def _word_level(tokens: tuple[str, ...], num_special: int) -> dict[str, Any]:
  """Returns a tokenizer.json of words between white space."""
  plain = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
  }
  return {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
      {"id": i, "content": token, **plain}
      for i, token in enumerate(tokens[:num_special])
    ],
    "normalizer": None,
    "pre_tokenizer": {"type": "WhitespaceSplit"},
    "post_processor": None,
    "decoder": None,
    "model": {
      "type": "WordLevel",
      "vocab": {token: i for i, token in enumerate(tokens)},
      # No word has a space, so an unknown one is an error, as it is here.
      "unk_token": "<unknown word>",
    },
  }
