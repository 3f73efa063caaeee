"""Parameters -> a directory that Hugging Face's transformers loads.

leaf by leaf: transposed on its devices -> gathered on the host -> appended
              to model.safetensors, or to the next of several files
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from models import config as config_lib
from models import definition, layer_stack
from models import policy as policy_lib
from models.chat import word_chat
from models.hf import config as hf_config
from models.hf import parameter_names, safetensors_io, tokenizer_files


@dataclasses.dataclass(frozen=True, eq=False)
class _Layer:
  """A parameter of one layer in a stack, which is sliced when it is written."""

  stack: jax.Array | np.ndarray
  index: int

  @property
  def shape(self) -> tuple[int, ...]:
    return self.stack.shape[1:]

  @property
  def dtype(self) -> np.dtype:
    return self.stack.dtype


_Leaf = jax.Array | np.ndarray | _Layer
Tokenizer = word_chat.WordChat | str | os.PathLike[str] | None

_to_stored = jax.jit(
  lambda leaf, entry: entry.to_stored(leaf), static_argnums=1
)


def export(
  directory: str | os.PathLike[str],
  params: definition.Params,
  config: config_lib.ModelConfig,
  tokenizer: Tokenizer = None,
  max_file_bytes: int = 5_000_000_000,
  report: Callable[[str], None] = lambda text: None,
  stop_ids: Sequence[int] = (),
) -> None:
  """Writes config.json, weights, tokenizer and chat template, or nothing.

  The host holds one leaf at a time. The directory appears when it is whole.

  Args:
    directory: is made, and must not exist.
    params: without adapters; `load.load` reads equal ones back. On several
      hosts each calls this, and the first one writes.
    tokenizer: ours, or the directory of the checkpoint whose tokenizer files
      are copied; None writes none.
    max_file_bytes: of tensors in a file; one that is larger has its own.
    report: is told how many of the parameters are written.
    stop_ids: end an answer; copied tokenizer files may lack some.

  Raises:
    ValueError: the directory exists or cannot be written, the parameters are
      not of `config`, or the tokenizer has more ids than the model.
  """
  target = pathlib.Path(directory)
  if os.path.exists(target):
    raise ValueError(f"{target} exists; remove it or choose another directory")
  entries = jax.tree.leaves(parameter_names.entries(config))
  leaves = _checked(params, config)
  _check_vocabulary(config, tokenizer)
  hosts = jax.process_count()
  if hosts > 1:
    multihost_utils.sync_global_devices("export: checked")
  tensors = _gathered(entries, leaves, report)
  if jax.process_index() == 0:
    plan = _plan(entries, leaves, max_file_bytes)
    _write(target, config, tokenizer, stop_ids, tensors, plan)
  else:
    for _ in tensors:
      pass
  if hosts > 1:
    multihost_utils.sync_global_devices("export: written")


def _write(
  target: pathlib.Path,
  config: config_lib.ModelConfig,
  tokenizer: Tokenizer,
  stop_ids: Sequence[int],
  tensors: Iterator[np.ndarray],
  plan: list[dict[str, tuple[tuple[int, ...], np.dtype]]],
) -> None:
  with safetensors_io.whole_directory(target) as partial:
    ids = _write_tokenizer(tokenizer, partial, stop_ids)
    _write_json(partial / "config.json", {**hf_config.to_hf(config), **ids})
    _write_tensors(partial, tensors, plan)


def _checked(
  params: definition.Params, config: config_lib.ModelConfig
) -> list[_Leaf]:
  """Returns the leaves, which are those of the config."""
  bare = dataclasses.replace(config, lora=None)
  if jax.tree.structure(params) != jax.tree.structure(
    policy_lib.of(bare).shapes
  ):
    raise ValueError(
      "the parameters are not of this model; merge adapters with "
      "models.lora.merge, and pass the config that they were made with"
    )
  leaves = jax.tree.leaves(layer_stack.unstack(params, config, _Layer))
  entries = jax.tree.leaves(parameter_names.entries(config))
  dtype = config.dtype
  for entry, leaf in zip(entries, leaves, strict=True):
    found, wanted = _like(leaf), f"{dtype}{list(entry.shape)}"
    if found != wanted:
      raise ValueError(
        f"{entry.names[0]}: the parameter is {found}, but the config says "
        f"{wanted}; pass the config that it was made with"
      )
  return leaves


def _like(array: _Leaf) -> str:
  return f"{array.dtype}{list(array.shape)}"


def _check_vocabulary(
  config: config_lib.ModelConfig, tokenizer: Tokenizer
) -> None:
  if tokenizer is None:
    return
  if isinstance(tokenizer, word_chat.WordChat):
    ids = tokenizer.vocab_size
  else:
    ids = tokenizer_files.num_ids(tokenizer)
  if ids > config.vocab_size:
    raise ValueError(
      f"model.vocab_size={config.vocab_size} is below the {ids} ids of the "
      "tokenizer; pass the one that the model was trained with"
    )


def _gathered(
  entries: list[parameter_names.Entry],
  leaves: list[_Leaf],
  report: Callable[[str], None],
) -> Iterator[np.ndarray]:
  """Yields every tensor on the host, in the order of `_plan`."""
  for i, (entry, leaf) in enumerate(zip(entries, leaves, strict=True)):
    like = parameter_names.Entry((), entry.axes, entry.shape, entry.num_in)
    array = leaf.stack[leaf.index] if isinstance(leaf, _Layer) else leaf
    host = safetensors_io.on_host(_to_stored(array, like))
    yield from host if entry.stacked else [host]
    report(f"writing the weights {i + 1}/{len(entries)}")


def _plan(
  entries: list[parameter_names.Entry], leaves: list[_Leaf], max_bytes: int
) -> list[dict[str, tuple[tuple[int, ...], np.dtype]]]:
  """Returns shape and dtype of the tensors of each file, in order."""
  plan, used = [{}], 0
  for entry, leaf in zip(entries, leaves, strict=True):
    dtype = np.dtype(leaf.dtype)
    size = safetensors_io.num_bytes(entry.tensor_shape, dtype)
    for name in entry.names:
      if plan[-1] and used + size > max_bytes:
        plan.append({})
        used = 0
      plan[-1][name] = entry.tensor_shape, dtype
      used += size
  return plan


def _write_tensors(
  directory: pathlib.Path,
  tensors: Iterator[np.ndarray],
  plan: list[dict[str, tuple[tuple[int, ...], np.dtype]]],
) -> None:
  """Writes the files, and their index when they are several."""
  num = len(plan)
  places: dict[str, str] = {}
  total = 0
  for number, content in enumerate(plan, 1):
    name = f"model-{number:05}-of-{num:05}.safetensors"
    name = name if num > 1 else safetensors_io.SINGLE
    with (directory / name).open("wb") as file:
      file.write(safetensors_io.header(content))
      for tensor in content:
        # bfloat16 has no buffers of its own.
        data = next(tensors).reshape(-1).view(np.uint8)
        total += file.write(data.data)
        places[tensor] = name
  # Past the last one: the generator ends as it does on the other hosts.
  assert next(tensors, None) is None
  if num > 1:
    index = {"metadata": {"total_size": total}, "weight_map": places}
    _write_json(directory / safetensors_io.INDEX, index)


def _write_tokenizer(
  tokenizer: Tokenizer, directory: pathlib.Path, stop_ids: Sequence[int]
) -> dict[str, Any]:
  """Returns the special ids for config.json."""
  if tokenizer is None:
    return {}
  if isinstance(tokenizer, word_chat.WordChat):
    return tokenizer_files.write(tokenizer, directory)
  return tokenizer_files.copy(tokenizer, directory, stop_ids)


def _write_json(path: pathlib.Path, data: Any) -> None:
  path.write_text(json.dumps(data, indent=2) + "\n", "utf-8")
