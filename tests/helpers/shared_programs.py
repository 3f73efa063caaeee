"""Jitted functions of equal settings, built once for all tests of a file.

Most of a test's time is tracing and lowering, and a new jitted function is
traced again. Those of learners and engines are functions of their settings and
their mesh alone.
"""

import copy
import sys

import pytest

_OF_A_RUNNER = (
  *("_programs", "_copy", "_gather", "_scatter"),
  *("_set_bias", "_set_masks", "_set_history"),
)


def share(patch: pytest.MonkeyPatch) -> None:
  """Has learners and engines share them, until the patch is undone."""
  if module := sys.modules.get("rl.train.learner"):
    _share_learners(module, patch)
  if module := sys.modules.get("rl.engine.builtin.model_runner"):
    _share_runners(module, patch)


def _share_learners(module, patch):
  built, build = {}, module.LearnerSettings.build

  def shared(settings, layout):
    try:
      known = built.get((settings, layout))
    except TypeError:  # An array or a list among the settings.
      return build(settings, layout)
    if known is None:
      known = built[settings, layout] = build(settings, layout)
    return copy.copy(known)  # What a test replaces is its own.

  patch.setattr(module.LearnerSettings, "build", shared)


def _share_runners(module, patch):
  built, init = {}, module.ModelRunner.__init__

  def shared(runner, *args, **kwargs):
    init(runner, *args, **kwargs)
    own = {name: vars(runner)[name] for name in _OF_A_RUNNER}
    key = (args, tuple(sorted(kwargs.items())))
    vars(runner).update(built.setdefault(key, own))

  patch.setattr(module.ModelRunner, "__init__", shared)
