"""Suggestions in the errors of a real run can be typed as they stand."""

import importlib
import pkgutil
import typing

import pytest

import envs
from configs import guess_number_moe
from envs import delayed, mixture
from rl.algorithms import corrections, kl, losses, presets, token_advantages
from rl.settings import annotations, overrides, short_names, suggestions
from rl.train import optimizers
from tests.helpers import packed_rows

RUN = guess_number_moe.get_config()
LOSSES = ", ".join(
  dict.fromkeys(short_names.of(loss) for loss in packed_rows.LOSSES)
)


def refused(path, text, run=RUN):
  with pytest.raises(overrides.SettingError) as error:
    overrides.override(run, path, text)
  assert "\n" not in str(error.value)
  return str(error.value)


def places(node, path=""):
  """Yields (path, annotation) of every object in a tree that can be given."""
  for name, hint in annotations.hints(type(node)).items():
    child = getattr(node, name)
    if any(map(annotations.is_object, annotations.members(hint))):
      yield path + name, hint
    if overrides.is_setting(type(child)):
      yield from places(child, f"{path}{name}.")


PLACES = dict(places(RUN))
# Only what is loaded is on offer.
MORE = (delayed.Delayed, mixture.Mixture, mixture.ByTask)

for module in pkgutil.walk_packages(envs.__path__, "envs."):
  importlib.import_module(module.name)
# A class or toolboxes; one of two servers; a package that is in no lock.
NEED_MORE = ("needs toolboxes", "give one of the two", "pip install")


@pytest.mark.parametrize("path", PLACES)
def test_everything_on_offer_is_taken_as_it_is_typed(path):
  offered = short_names.choices(PLACES[path])
  # Other policies than ours come from the user's files alone.
  assert offered or path == "model.policy"
  for maker in offered.values():
    text = suggestions.form(maker)
    # Names of sizes and directories are for the user to choose.
    if "NAME" in text:
      continue
    try:
      tree: typing.Any = overrides.override(RUN, path, text)
    except overrides.SettingError as error:
      if any(needed in str(error) for needed in NEED_MORE):
        continue
      raise
    for name in path.split("."):
      tree = getattr(tree, name)
    assert type(tree) is annotations.made(maker)
    if path == "model.rope_scaling":
      tree.validate()


@pytest.mark.parametrize(
  ("path", "text", "value"),
  [
    ("algorithm.loss", "gspo", losses.Gspo()),
    # One word: a preset here, a loss there.
    ("algorithm", "gspo", presets.Gspo()),
    (
      "algorithm.correction",
      "token_truncated(cap=3)",
      corrections.TokenTruncated(cap=3.0),
    ),
    (
      "algorithm.correction",
      "both(first=token_truncated, second=dppo_mask(bound=0.5))",
      corrections.Both(
        first=corrections.TokenTruncated(),
        second=corrections.DppoMask(bound=0.5),
      ),
    ),
    (
      "algorithm.kl",
      "kl_penalty(estimator=k3_plus, weight=3e-4)",
      kl.KlPenalty(estimator="k3_plus", weight=3e-4),
    ),
    ("algorithm.advantage", "gae", token_advantages.Gae()),
    ("optimizer", "adamw", optimizers.AdamW()),
    # The path that JSON has.
    ("algorithm.loss", "rl.algorithms.losses.Gspo()", losses.Gspo()),
  ],
)
def test_parts_are_typed_by_their_short_names(path, text, value):
  tree: typing.Any = overrides.override(RUN, path, text)
  for name in path.split("."):
    tree = getattr(tree, name)
  assert tree == value


@pytest.mark.parametrize(
  ("path", "text", "meant", "others"),
  [
    ("algorithm.loss", "cispoo", "cispo", LOSSES),
    ("algorithm.loss", "losses.Cispoo()", "cispo", LOSSES),
    # Class paths of earlier versions.
    (
      "algorithm.loss",
      "rl.losses.Gspo",
      "gspo (rl.algorithms.losses.Gspo)",
      "",
    ),
    ("algorithm.loss", "losses.Gspo()", "gspo (rl.algorithms.losses.Gspo)", ""),
    (
      "algorithm",
      "rl.algorithms.Gspo",
      "gspo (rl.algorithms.presets.Gspo)",
      "",
    ),
    ("algorithm.kl", "KlPenalty", "kl_penalty", ""),
    ("algorithm.correction", "icepop", "ice_pop", "k(delta=1.0), dppo_mask,"),
    ("algorithm.advantage", "pass_k", "pass_at_k(k=4)", "grpo, dr_grpo, rloo"),
    ("algorithm.loss.aggregate", "SequenceMean", "sequence_mean", "token_mean"),
    ("optimizer", "adam", "adamw", "adamw, adafactor, muon"),
    ("model", "tny", "tiny", "model_config"),
    ("overlap", "snc", "sync(groups_per_round=4)", "overlap"),
    ("algorithm", "grop", "grpo", None),
    ("algorithm", "gpro", "grpo", None),
    ("engine", "sglan", "sglang", None),
    ("algorithm.reference", "initail", "initial", "teacher(model=model_config"),
  ],
)
def test_the_nearest_is_named_and_then_the_others(path, text, meant, others):
  _, found, rest = refused(path, text).partition("; did you mean ")
  assert found
  nearest, _, rest = rest.partition("?")
  assert nearest == meant
  # What "expected .." lists already is not said again.
  assert (others in rest) if others is not None else not rest
  # Parts that may be set below are only in the way.
  assert "or set a part" not in rest


def test_an_object_that_needs_others_is_offered_with_some():
  makers = [
    *short_names.choices(PLACES["environment"]).values(),
    *short_names.choices(PLACES["reward"]).values(),
  ]
  assert {*MORE} < {*makers}
  assert not [x for x in makers if "..." in suggestions.form(x)]


def test_all_losses_are_offered_and_nothing_else():
  # Both are calls of one argument; only what they return tells them apart.
  for path, module in (("algorithm.loss", losses), ("optimizer", optimizers)):
    offered = short_names.choices(PLACES[path]).values()
    # Files of configs/ may have been loaded, with losses of their own.
    places = {x.__module__ for x in offered if "_config_" not in x.__module__}
    assert places == {module.__name__}
  assert {losses.Cispo, losses.Gspo} < {
    *short_names.choices(PLACES["algorithm.loss"]).values()
  }


def test_the_only_class_tells_what_it_takes():
  assert refused("algorithm.kl", "k3") == (
    "--config.algorithm.kl=k3: expected KlPenalty | none, such as kl_penalty; "
    "it takes estimator (k1 | k2 | k3 | k3_plus), weight (float), where "
    "(loss | reward), late (Correction | none)"
  )


def test_a_word_that_is_near_to_nothing_is_told_what_there_is():
  words = refused("algorithm.loss", "3")
  assert f", such as {LOSSES}, " in words
  assert ", or set a part of it: --config.algorithm.loss.clip_low" in words


@pytest.mark.parametrize(
  ("path", "text", "message"),
  [
    ("algorithm.advantage", "pass_at_k", "needs k, as in pass_at_k(k=4)"),
    (
      "algorithm.reference",
      "teacher",
      "needs model, directory, as in teacher(model=model_config, "
      "directory=NAME)",
    ),
  ],
)
def test_what_is_missing_is_named_with_a_form_that_works(path, text, message):
  assert refused(path, text) == f"--config.{path}: {message}"


def test_a_teacher_can_be_typed():
  text = (
    "teacher(directory='/no-such/place', "
    "model=tiny_moe(vocab_size=29,max_length=32))"
  )
  run = overrides.apply(
    RUN, {"algorithm": "distill", "algorithm.reference": text}
  )
  reference: typing.Any = run.algorithm.reference
  assert reference.directory == "/no-such/place"
  assert reference.model == RUN.model
  run.algorithm.validate()
  wrong = text.replace("max_length=32", "max_lenght=32")
  assert refused("algorithm.reference", wrong) == (
    "--config.algorithm.reference.model.max_lenght: tiny_moe has no such field;"
    " did you mean max_length?"
  )
