"""Exports a run: python -m launch.export --run=DIR --directory=OUT.

OUT becomes a Hugging Face checkpoint: the weights of the run's newest
checkpoint, or of the newest of its warm start until that is done, config,
tokenizer and chat template. Adapters are merged into the
weights; --adapter writes the adapters alone, in the format of PEFT.
"""

import asyncio
import dataclasses
import os
import pathlib
import sys
from collections.abc import Callable

from absl import app
from absl import flags as absl_flags

from launch.cli import flags, known_programs, steps, workdir
from launch.run import load_run
from models import config as config_lib
from models import lora
from models.chat import word_chat
from models.hf import config as hf_config
from models.hf import export, peft
from rl import experiment as experiment_lib
from rl.rollout import chats, episode
from rl.settings import overrides

_RUN = absl_flags.DEFINE_string(
  "run", None, "Directory of a run.", required=True
)
_DIRECTORY = absl_flags.DEFINE_string(
  "directory", None, "Directory to write; must not exist.", required=True
)
_TOKENIZER = absl_flags.DEFINE_string(
  "tokenizer",
  None,
  "Directory whose tokenizer and chat template are copied. Default: those of"
  " the run.",
)
_ADAPTER = absl_flags.DEFINE_bool(
  "adapter",
  False,
  "Writes only the adapters of a run with model.lora, for PEFT on top of the"
  " initial model of the run.",
)
_PLATFORM = absl_flags.DEFINE_enum(
  "platform",
  None,
  ["cpu", "gpu", "tpu"],
  "Devices that load the weights. Default: those of the run.",
)
absl_flags.adopt_module_key_flags(known_programs)


@flags.command
def main() -> None:
  """Restores the newest checkpoint and writes it."""
  target = pathlib.Path(_DIRECTORY.value)
  with flags.exit_on_setting_error():
    experiment = workdir.read_trained(_RUN.value)
    if _PLATFORM.value is not None:
      placement = dataclasses.replace(
        experiment.placement, platform=_PLATFORM.value
      )
      experiment = dataclasses.replace(experiment, placement=placement)
    source = _TOKENIZER.value
    _check_place(target, source)
    if _ADAPTER.value:
      _check_adapter(experiment, source)
    load_run.prepare(experiment, _RUN.value, plays=False)
  run_dir = pathlib.Path(_RUN.value)
  with steps.Steps(sys.stderr) as shown:
    step = asyncio.run(_export(experiment, run_dir, target, shown.phase))
  print(f"{target}: {experiment.environment.name} after {step} rounds")


def _check_place(target: pathlib.Path, source: str | None) -> None:
  # os.path.exists is False without permission; writing then reports it.
  if os.path.exists(target):
    raise overrides.SettingError(
      f"--directory={target} exists; remove it or choose another"
    )
  if source is not None and not pathlib.Path(source).is_dir():
    raise overrides.SettingError(f"--tokenizer={source}: no such directory")


def _check_adapter(
  experiment: experiment_lib.Experiment, source: str | None
) -> None:
  if experiment.model.lora is None:
    raise overrides.SettingError(
      "--adapter: the run has no adapters, as model.lora is none; leave "
      "--adapter out to write its weights"
    )
  if experiment.initial is None:
    raise overrides.SettingError(
      "--adapter: the run has no initial model, so its adapters fit no other; "
      "leave --adapter out to write its weights with the adapters merged"
    )
  if source is not None:
    raise overrides.SettingError(
      f"--tokenizer={source}: an adapter has no tokenizer; leave out either "
      "--adapter or --tokenizer"
    )


def _tokenizer_of(
  run_dir: pathlib.Path, chat: episode.Chat
) -> export.Tokenizer:
  """Returns the words of a run, or the directory of its tokenizer."""
  if isinstance(chat, word_chat.WordChat):
    return chat
  return run_dir / chats.KEPT


def _with_length(
  model: config_lib.ModelConfig, initial: str | None
) -> config_lib.ModelConfig:
  """Returns the model with the context of its initial one, if that is longer.

  A run may be shorter than what its model takes.
  """
  if initial is None:
    return model
  try:
    length = hf_config.load(initial, model.compute).max_length
  except ValueError:  # It may be gone: a run does not need it any more.
    return model
  return dataclasses.replace(model, max_length=max(length, model.max_length))


async def _export(
  experiment: experiment_lib.Experiment,
  run_dir: pathlib.Path,
  target: pathlib.Path,
  report: Callable[[str], None],
) -> int:
  """Writes the weights; returns the number of rounds that trained them."""
  report("loading the weights")
  async with load_run.weights(experiment, run_dir) as found:
    report("writing the weights")
    chat = experiment.build_chat()  # The tokenizer that the run keeps.
    model = _with_length(experiment.model, experiment.initial)
    params = found.state.params
    with flags.exit_on_setting_error():
      if _ADAPTER.value:
        peft.export(target, params, model, experiment.initial)
      else:
        export.export(
          target,
          lora.merge(params, model.lora),
          dataclasses.replace(model, lora=None),
          _TOKENIZER.value or _tokenizer_of(run_dir, chat),
          report=report,
          stop_ids=() if _TOKENIZER.value else chat.stop_ids,
        )
  return found.step


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse_without_settings)
