"""What the errors of a real run offer can be typed as it stands."""

import pkgutil
import typing

import pytest

from configs import guess_number_moe
from envs import delayed, mixture
from rl.settings import annotations, overrides, suggestions

RUN = guess_number_moe.get_config()
TEACHER = "rl.algorithms.references.Teacher(model=models.config.ModelConfig()"


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


@pytest.mark.parametrize("path", PLACES)
def test_everything_on_offer_is_taken_as_it_is_typed(path):
  hint = PLACES[path]
  offered = suggestions.forms(hint)
  # Names of sizes are for who types them to choose.
  offered = [text for text in offered if "NAME" not in text]
  # The engine's two have a short name, and so have all algorithms.
  assert offered or path in ("engine", "algorithm", "algorithm.reference")
  for text in offered:
    tree: typing.Any = overrides.override(RUN, path, text)
    for name in path.split("."):
      tree = getattr(tree, name)
    maker = pkgutil.resolve_name(text.partition("(")[0])
    assert type(tree) is annotations.made(maker)


@pytest.mark.parametrize(
  ("path", "text", "meant", "others"),
  [
    (
      "algorithm.loss",
      "cispo",
      "rl.algorithms.losses.Cispo()",
      "rl.algorithms.losses.Gspo()",
    ),
    (
      "algorithm.loss",
      "rl.algorithms.losses.Cispoo()",
      "rl.algorithms.losses.Cispo()",
      "rl.loss",
    ),
    (
      "algorithm.loss",
      "losses.Cispoo()",
      "rl.algorithms.losses.Cispo()",
      "rl.algorithms.losses.",
    ),
    (
      "algorithm.loss",
      "Cispo()",
      "rl.algorithms.losses.Cispo()",
      "rl.algorithms.losses.Gspo()",
    ),
    ("algorithm.kl", "KlPenalty", "rl.algorithms.kl.KlPenalty()", ""),
    (
      "algorithm.correction",
      "icepop",
      "rl.algorithms.corrections.IcePop()",
      "rl.algorithms.corrections.OffPolicySequenceMask(delta=0.1)",
    ),
    (
      "algorithm.advantage",
      "gae",
      "rl.algorithms.token_advantages.Gae()",
      "rl.algorithms.advantages.PassAtK(k=4)",
    ),
    (
      "algorithm.loss.aggregate",
      "SequenceMean",
      "rl.algorithms.loss_aggregation.SequenceMean()",
      "rl.algorithms.loss_aggregation.TokenMean()",
    ),
    (
      "optimizer",
      "muon",
      "rl.train.optimizers.Muon()",
      "rl.train.optimizers.AdamW()",
    ),
    ("model", "tiny", "models.config.tiny()", "models.config.ModelConfig()"),
    (
      "overlap",
      "sync",
      "rl.schedule.overlap.sync(groups_per_round=4)",
      "rl.schedule.overlap.",
    ),
    ("algorithm", "grop", "grpo", ""),
    ("engine", "sglan", "sglang", ""),
    ("algorithm.reference", "initail", "initial", ""),
    (
      "algorithm.reference",
      "teachr",
      f"{TEACHER}, directory=NAME)",
      "",
    ),
  ],
)
def test_the_nearest_is_named_and_then_the_others(path, text, meant, others):
  _, found, rest = refused(path, text).partition("; did you mean ")
  assert found
  nearest, _, rest = rest.partition("?")
  assert nearest == meant
  assert (others in rest) if others else not rest
  # What may be set below is only in the way.
  assert "or set a part" not in rest


def test_an_object_that_needs_others_is_offered_with_some():
  offered = [
    *suggestions.forms(PLACES["environment"]),
    *suggestions.forms(PLACES["reward"]),
  ]
  names = [text.partition("(")[0] for text in offered]
  assert {f"{cls.__module__}.{cls.__name__}" for cls in MORE} < {*names}
  assert not [text for text in offered if "..." in text]


def test_all_losses_are_offered_and_nothing_else():
  # Both are calls of one argument; only what they return tells them apart.
  losses = suggestions.forms(PLACES["algorithm.loss"])
  assert {"rl.algorithms.losses.Cispo()", "rl.algorithms.losses.Gspo()"} < {
    *losses
  }
  # Files of configs/ may have been loaded, with losses of their own.
  places = ("rl.algorithms.losses.", "_config_")
  assert not [text for text in losses if not text.startswith(places)]
  optimizers = suggestions.forms(PLACES["optimizer"])
  others = [t for t in optimizers if not t.startswith("rl.train.optimizers.")]
  assert not others


def test_the_only_class_tells_what_it_takes():
  assert refused("algorithm.kl", "k3") == (
    "--config.algorithm.kl=k3: expected KlPenalty | none, such as "
    "rl.algorithms.kl.KlPenalty(); it takes estimator (k1 | k2 | k3 | k3+), "
    "weight "
    "(float), where (loss | reward)"
  )
  assert (
    ", such as rl.algorithms.dynamic_sampling.DynamicSampling(); it takes "
    in refused("algorithm.sampling", "true")
  )


def test_a_word_that_is_near_to_nothing_is_told_what_there_is():
  words = refused("algorithm.loss", "3")
  assert ", such as rl.algorithms.losses.ClippedSurrogate(), " in words
  assert ", or set a part of it: --config.algorithm.loss.clip_low" in words


@pytest.mark.parametrize(
  ("path", "text", "message"),
  [
    (
      "algorithm.advantage",
      "rl.algorithms.advantages.PassAtK()",
      "needs k, as in rl.algorithms.advantages.PassAtK(k=4)",
    ),
    (
      "algorithm.correction",
      "rl.algorithms.corrections.OffPolicySequenceMask()",
      "needs delta, as in "
      "rl.algorithms.corrections.OffPolicySequenceMask(delta=0.1)",
    ),
    (
      "algorithm.reference",
      "teacher",
      f"needs model, directory, as in {TEACHER}, directory=NAME)",
    ),
  ],
)
def test_what_is_missing_is_named_with_a_form_that_works(path, text, message):
  assert refused(path, text) == f"--config.{path}: {message}"


def test_a_teacher_can_be_typed():
  text = (
    "rl.algorithms.references.Teacher(directory=/no-such/place, "
    "model=models.config.tiny_moe(vocab_size=29,max_length=32))"
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
    "--config.algorithm.reference.model.max_lenght: models.config.tiny_moe has "
    "no such field; did you mean max_length?"
  )


def test_modules_need_no_package_and_words_no_quotes():
  text = "kl.KlPenalty(estimator=k3+, weight=3e-4)"
  assert overrides.override(RUN, "algorithm.kl", text) == overrides.override(
    RUN,
    "algorithm.kl",
    "rl.algorithms.kl.KlPenalty(estimator='k3+', weight=0.0003)",
  )
