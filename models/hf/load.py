"""Hugging Face checkpoints -> parameters, straight onto the mesh.

  headers -> everything that does not fit, told at once
  leaf by leaf: slices that devices of this host need -> devices
                -> transposed, cast and checked for NaN there

A host holds one shard of one leaf at a time, and reads nothing that its own
devices do not keep.
"""

import dataclasses
import functools
import os
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import config as config_lib
from models import definition, layer_stack, sharding
from models.hf import config as hf_config
from models.hf import parameter_names, safetensors_io, tokenizer_files

_MOST = 10
_ADAPTER = "adapter_config.json"
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
# Buffers of old checkpoints; they follow from the config.
_HARMLESS = "rotary_emb.inv_freq"


class Unusable(ValueError):
  """A checkpoint that cannot be loaded; the message lists all reasons."""


def load(
  directory: str | os.PathLike[str],
  config: config_lib.ModelConfig,
  layout: sharding.Layout | None = None,
  report: Callable[[str], None] = lambda text: None,
) -> definition.Params:
  """Returns the parameters of a checkpoint, in `config.dtype`.

  The tree is that of `policy.of`, without adapters. With tied
  embeddings a stored head is compared with the embedding and left out.

  Args:
    directory: config.json and model.safetensors, or several files and
      model.safetensors.index.json.
    layout: where the parameters go; None is the default device. On several
      hosts each calls this, with the same files within reach.
    report: is told how many of the parameters are there.

  Raises:
    Unusable: everything that `check` finds, or the tensors that hold NaN or
      infinity.
  """
  with safetensors_io.TensorFiles(directory) as files:
    refuse(files.directory, _problems(files, config))
    return place(files, config, layout, report)


def check(
  directory: str | os.PathLike[str], config: config_lib.ModelConfig
) -> None:
  """Checks a checkpoint by its headers and config.json; touches no device.

  Raises:
    Unusable: lists everything wrong: missing or damaged files, tensors that
      are missing, unknown, misshaped or not floats, and settings that differ
      from config.json.
  """
  with safetensors_io.TensorFiles(directory) as files:
    refuse(files.directory, _problems(files, config))


def refuse(directory: pathlib.Path, problems: Sequence[str]) -> None:
  """Raises Unusable for a directory with problems."""
  if problems:
    listing = "\n  ".join(problems)
    raise Unusable(f"{directory} cannot be loaded:\n  {listing}")


def _problems(
  files: safetensors_io.TensorFiles, config: config_lib.ModelConfig
) -> list[str]:
  if problem := _place_problem(files):
    return [problem]
  try:
    entries = jax.tree.leaves(parameter_names.entries(config))
  except ValueError as error:
    return [str(error)]
  problems = [
    *_config_problems(files.directory, config),
    *_tokenizer_problems(files.directory, config),
    *files.problems,
  ]
  # Without any file, all tensors would be missing.
  if files.tensors:
    problems += tensor_problems(files, entries, config.tie_embeddings)
  return problems


def _place_problem(files: safetensors_io.TensorFiles) -> str | None:
  """Returns why a path holds no weights, and what might be meant."""
  path = files.directory
  if path.is_file():
    return f"it is a file; name the directory that holds it, {path.parent}"
  if not path.is_dir():
    problem = "the directory does not exist"
    if not path.is_absolute():
      problem += f" in {pathlib.Path.cwd()}"
    if _HUB_NAME.fullmatch(str(path)):
      problem += (
        "; if this is the name of a published model, download it first and "
        "name the directory where it lies"
      )
    return problem
  if (path / _ADAPTER).is_file() and not files.tensors:
    return (
      f"it holds {_ADAPTER}, so an adapter alone; merge it into its model, as "
      "launch.export does without --adapter, and name that directory"
    )
  return None


def _tokenizer_problems(
  directory: pathlib.Path, config: config_lib.ModelConfig
) -> list[str]:
  try:
    ids = tokenizer_files.num_ids(directory)
  except ValueError as error:
    return [str(error)]
  if ids <= config.vocab_size:
    return []
  return [
    f"tokenizer.json has {ids} ids, but model.vocab_size={config.vocab_size}; "
    "the tokenizer is of another model"
  ]


def _config_problems(
  directory: pathlib.Path, config: config_lib.ModelConfig
) -> list[str]:
  if not (directory / "config.json").is_file():
    return ["it holds no config.json"]
  try:
    theirs = hf_config.load(directory, config.compute)
  except ValueError as error:
    return [f"config.json: {error}"]
  differ = []
  for field in dataclasses.fields(config):
    ours, found = getattr(config, field.name), getattr(theirs, field.name)
    if field.name in _irrelevant(config, theirs):
      continue
    if field.name == "max_length":
      if ours > found:
        differ.append(
          f"model.max_length={ours} is above the {found} of config.json; use "
          f"{found} or less"
        )
    elif ours != found:
      differ.append(
        f"model.{field.name}={ours}, but config.json has {found}; "
        "models.hf.config.load(directory) reads all of it"
      )
  return differ


def _irrelevant(*configs: config_lib.ModelConfig) -> set[str]:
  """Returns fields that do not change what either model computes."""
  names = {"compute", "lora", "policy"}
  if not any(config.num_sparse for config in configs):
    names |= {"num_experts", "experts_per_token", "d_expert"}
    names |= {"norm_topk_prob", "dense_layers"}
  if all(config.num_sparse == config.num_layers for config in configs):
    names |= {"d_ff"}
  return names


def tensor_problems(
  files: safetensors_io.TensorFiles,
  entries: list[parameter_names.Entry],
  tied: bool,
) -> list[str]:
  """Returns what is wrong with the tensors for these entries, a line a kind.

  Args:
    tied: a head may be there, of the shape of the embedding.
  """
  wanted = {name: entry for entry in entries for name in entry.names}
  found = dict(files.tensors)
  if tied and parameter_names.HEAD in found:
    wanted[parameter_names.HEAD] = wanted[parameter_names.EMBED]
  missing = wanted.keys() - found.keys() - files.unread
  extra = found.keys() - wanted.keys()
  extra = {name for name in extra if not name.endswith(_HARMLESS)}
  problems = []
  if missing:
    problems.append(
      f"missing tensors ({len(missing)}): {safetensors_io.listing(missing)}"
    )
  if extra:
    problems.append(
      f"extra tensors ({len(extra)}): {safetensors_io.listing(extra)}"
    )
  known = sorted(wanted.keys() & found.keys())
  shapes = [
    f"{name} is {list(found[name].shape)} instead of "
    f"{list(wanted[name].tensor_shape)}"
    for name in known
    if found[name].shape != wanted[name].tensor_shape
  ]
  no_floats = [
    f"{name} is {found[name].code}" for name in known if not found[name].dtype
  ]
  for title, lines in (
    ("misshaped tensors", shapes),
    (
      "tensors of other types than floats; quantised weights are not read",
      no_floats,
    ),
  ):
    if lines:
      more = f" and {len(lines) - _MOST} more" * (len(lines) > _MOST)
      text = "; ".join(lines[:_MOST])
      problems.append(f"{title} ({len(lines)}): {text}{more}")
  return problems


def place(
  files: safetensors_io.TensorFiles,
  config: config_lib.ModelConfig,
  layout: sharding.Layout | None = None,
  report: Callable[[str], None] = lambda text: None,
) -> definition.Params:
  """Returns what `load` returns, from open files that passed `check`.

  `files.bytes_read` grows by what the devices of this host keep; what several
  of them keep is read once.

  Raises:
    Unusable: lists the tensors that hold NaN or infinity; or a stored head
      differs from the embedding to which it is tied.
  """
  # One program for all leaves that look the same, over all layers.
  converter = functools.cache(
    functools.partial(_converter, config.dtype, layout)
  )
  finite: dict[str, jax.Array] = {}
  entries = parameter_names.entries(config)
  total = len(jax.tree.leaves(entries))

  def leaf(entry: parameter_names.Entry) -> jax.Array:
    convert = converter(dataclasses.replace(entry, names=()))
    ours, finite[entry.names[0]] = convert(_stored(entry, layout, files))
    report(f"loading the weights {min(len(finite), total)}/{total}")
    # Transfers run behind: without this, host copies would pile up.
    return jax.block_until_ready(ours)

  # A layer at a time, so that the host holds no more.
  put = jax.jit(lambda stack, own, at: stack.at[at].set(own), donate_argnums=0)

  def stacked(layers: list[parameter_names.Entry]) -> jax.Array:
    shape, where = (len(layers), *layers[0].shape), None
    if layout is not None:
      where = layout.sharding(None, *layers[0].axes)
    stack = jnp.zeros(shape, config.dtype, device=where)
    for at, entry in enumerate(layers):
      stack = put(stack, leaf(entry), at)
    return stack

  params = jax.tree.map(
    lambda node: (
      leaf(node) if isinstance(node, parameter_names.Entry) else node
    ),
    layer_stack.stack(entries, config, stacked),
  )
  good = jax.device_get(finite)
  bad = [
    name
    for entry in jax.tree.leaves(entries)
    for name, fine in zip(
      entry.names, np.ravel(good[entry.names[0]]), strict=True
    )
    if not fine
  ]
  if bad:
    names = safetensors_io.listing(bad)
    problem = (
      f"NaN or infinity in {len(bad)} tensors: {names}; copy the files again, "
      "or use another checkpoint"
    )
    refuse(files.directory, [problem])
  if config.tie_embeddings and parameter_names.HEAD in files.tensors:
    equal = jax.jit(jnp.array_equal, out_shardings=layout and layout.sharding())
    entry = dataclasses.replace(entries["embed"], names=(parameter_names.HEAD,))
    if not jax.device_get(equal(leaf(entry), params["embed"])):
      problem = (
        f"{parameter_names.HEAD} differs from {parameter_names.EMBED}; "
        "tie_embeddings=false, "
        "here and in config.json, uses both"
      )
      refuse(files.directory, [problem])
  return params


def _converter(
  dtype: str, layout: sharding.Layout | None, entry: parameter_names.Entry
) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
  """Returns stored -> (ours, whether each tensor of it is finite)."""

  def convert(stored):
    ours = entry.to_ours(stored).astype(dtype)
    axes = range(int(entry.stacked), ours.ndim)
    return ours, jnp.all(jnp.isfinite(ours), axes)

  if layout is None:
    return jax.jit(convert)
  places = layout.sharding(*entry.axes), layout.sharding()
  return jax.jit(convert, out_shardings=places)


def _stored(
  entry: parameter_names.Entry,
  layout: sharding.Layout | None,
  files: safetensors_io.TensorFiles,
) -> jax.Array:
  """Returns [E?, out, in] as stored, split over devices as ours will be."""
  shape = entry.stored_shape
  if layout is None:
    return jax.device_put(
      _read(entry, files, tuple(slice(0, size) for size in shape))
    )
  spec = []
  for group in entry.groups:
    parts = (layout.spec(entry.axes[axis])[0] for axis in group)
    names = [(part,) if isinstance(part, str) else part for part in parts]
    spec.append(sum(filter(None, names), ()) or None)
  place = jax.sharding.NamedSharding(layout.mesh, jax.P(*spec))
  owners: dict[tuple[tuple[int, int], ...], list[Any]] = {}
  for device, index in place.addressable_devices_indices_map(shape).items():
    parts = zip(index or (), shape, strict=True)
    bounds = tuple(part.indices(size)[:2] for part, size in parts)
    owners.setdefault(bounds, []).append(device)
  shards = []
  for bounds, devices in owners.items():
    piece = _read(entry, files, tuple(slice(*pair) for pair in bounds))
    shards += jax.block_until_ready(
      [jax.device_put(piece, device) for device in devices]
    )
  return jax.make_array_from_single_device_arrays(shape, place, shards)


def _read(
  entry: parameter_names.Entry,
  files: safetensors_io.TensorFiles,
  index: tuple[slice, ...],
) -> np.ndarray:
  """Returns a slice of [E?, out, in], experts stacked."""
  dtypes = {files.tensors[name].dtype for name in entry.names}
  dtype = dtypes.pop()
  # Devices have no float64, and a stack is of one type.
  if dtypes or dtype == np.float64:
    dtype = np.dtype(np.float32)
  if not entry.stacked:
    return files.read(entry.names[0], index).astype(dtype, copy=False)
  shape = tuple(part.stop - part.start for part in index)
  stack = np.empty(shape, dtype)
  for place, name in enumerate(entry.names[index[0]]):
    stack[place] = files.read(name, index[1:])
  return stack
