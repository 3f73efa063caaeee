"""The settings of a run: a valid one, and each combination that is not."""

import collections
import dataclasses
import json
import pathlib
import re
from typing import Any, get_args

import pytest

from envs import delayed, mixture
from envs.offload import process_pool
from envs.rewards import rewards
from envs.suites import self_play
from launch.cli import flags
from models import config as model_config
from rl import experiment as experiment_lib
from rl.algorithms import presets, references, token_advantages
from rl.engine.builtin import settings as engine_settings
from rl.engine.sglang import settings as sglang_settings
from rl.loop import metric_bounds
from rl.pools import affinity, placement
from rl.schedule import overlap
from rl.settings import overrides as overrides_lib
from rl.testing import fakes

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def experiment() -> experiment_lib.Experiment:
  return flags.load(str(ROOT / "configs" / "guess_number_moe.py"))


def _override(tree, overrides):
  for path, text in overrides.items():
    tree = overrides_lib.override(tree, path, text)
  return tree


@pytest.mark.parametrize(
  ("overrides", "message"),
  [
    (
      {"rollout.group_size": "7"},
      "rollout.group_size=7: tictactoe-v0 plays 2 members together; use a "
      "multiple",
    ),
    (
      {"overlap.redundancy.extra_members": "2"},
      "extra_members=2: members of tictactoe-v0 play each other",
    ),
  ],
)
def test_members_that_play_each_other_need_partners(
  experiment, overrides, message
):
  playing = dataclasses.replace(experiment, environment=self_play.TwoPlayer())
  with pytest.raises(ValueError, match=re.escape(message)):
    _override(playing, overrides).validate()


@pytest.mark.parametrize(
  "overrides",
  [
    {},
    {"warm_start": "none"},
    {"evaluation.every": "0", "evaluation.temperature": "0"},
    {
      "rollout.group_size": "1",
      "algorithm.advantage": "reinforce",
    },
    # 10 rows over 5 * 2 devices, 4 experts over 2, and engine rows over 8.
    {
      "batch.tail_rows": "none",
      "placement.learner.data": "5",
      "placement.learner.expert": "2",
      "placement.learner.rules.embed": "none",
    },
    {"placement.learner.tensor": "2", "placement.learner.rules.vocab": "none"},
    {"placement.decode.data": "8"},
    {"batch.length": "32", "rollout.max_tokens": "32"},
    {"progress_timeout_s": "631.5"},
    {
      "algorithm.advantage": ("reinforce_pp(baseline=group)"),
      "overlap.groups_per_microbatch": "16",
    },
    {"algorithm.dynamic_sampling": "dynamic_sampling"},
    {"rollout.overlong": "overlong(max_tokens=32, buffer=32)"},
    {"routing.default": "decode"},
    {"model.compute.attention": "splash", "batch.length": "128"},
    {"model.compute.attention": "blockwise", "batch.share_prompts": "true"},
  ],
)
def test_settings_that_fit_together_are_accepted(experiment, overrides):
  _override(experiment, overrides).validate()


@pytest.mark.parametrize(
  ("overrides", "message"),
  [
    # 6 words of the game, 20 numbers and 3 special tokens are 29 ids.
    (
      {"model.vocab_size": "28"},
      "model.vocab_size=28 is below the 29 ids that the words of guess_number"
      " make; use 29 or more",
    ),
    (
      {"rollout.group_size": "1"},
      "rollout.group_size=1 is below the 2 that grpo compares; raise it or"
      " use algorithm.advantage=reinforce",
    ),
    (
      {"placement.learner.context": "3", "batch.length": "64"},
      "batch.length=64 does not divide over placement.learner.context=3; use"
      " batch.length=66",
    ),
    (
      {
        "rollout.group_size": "1",
        "algorithm.advantage": "reinforce",
        "reward": "envs.rewards.comparison.Shortest(among=outcome)",
      },
      "rollout.group_size=1 is below the 2 that reward shortest compares; raise"
      " it",
    ),
    (
      {
        "reward": "envs.offload.http.Http(url='http://x', reward=outcome)",
        "rollout.grading.deadline_s": "10",
      },
      "rollout.grading.deadline_s=10 is below timeout_s=20 of reward http",
    ),
    (
      {"batch.length": "31"},
      "batch.length=31 is below rollout.max_tokens=32; an episode would not"
      " fit; lower rollout.max_tokens to 31, or use 32 or more",
    ),
    (
      {"model.max_length": "31"},
      "model.max_length=31 is below rollout.max_tokens=32; an episode would"
      " not fit; lower rollout.max_tokens to 31, or use 32 or more",
    ),
    (
      {"placement.learner.expert": "3"},
      "model.num_experts=4 does not divide over placement.learner.expert=3;"
      " use placement.learner.expert=2",
    ),
    (
      {"placement.decode.expert": "6"},
      "model.num_experts=4 does not divide over placement.decode.expert=6; use"
      " placement.decode.expert=4",
    ),
    (
      {"placement.learner.tensor": "2"},
      "model.vocab_size=29 does not divide over placement.learner.tensor=2;"
      " use placement.learner.tensor=1 or placement.learner.rules.vocab=none or"
      " model.vocab_size=30",
    ),
    (
      {"placement.learner.data": "11"},
      "model.d_model=128 does not divide over placement.learner.data=11; use"
      " placement.learner.data=8 or placement.learner.rules.embed=none",
    ),
    # The next multiple of 4 above 10 is 12.
    (
      {"placement.learner.data": "2", "placement.learner.expert": "2"},
      "batch.rows=10 does not divide over placement.learner.data * expert = 4;"
      " use batch.rows=12",
    ),
    (
      {"placement.learner.expert": "2", "batch.tail_rows": "5"},
      "batch.tail_rows=5 does not divide over placement.learner.data * expert ="
      " 2; use batch.tail_rows=6",
    ),
    (
      {"placement.learner.data": "5", "placement.learner.expert": "2"},
      "batch.tail_rows=2 with rows=10: no number below divides over "
      "placement.learner.data * expert = 10; use none",
    ),
    # 16 groups of 8 in each of two rounds.
    (
      {"placement.replicas": "257"},
      "placement.replicas=257 makes 257 engines, but 256 episodes at most",
    ),
    (
      {
        "placement.replicas": "17",
        "overlap.admission": "hard_frontier",
        "overlap.frontier_groups": "2",
      },
      "placement.replicas=17 makes 17 engines, but 16 episodes at most",
    ),
    (
      {"batch.tail_rows": "10"},
      "batch.tail_rows=10 with rows=10: a tail has fewer rows; use fewer",
    ),
    # Rows of decoding are 32, 64, 128 and the 256 slots.
    (
      {"placement.decode.data": "3"},
      "engine.slots=256 does not divide over placement.decode.data * expert ="
      " 3; use engine.slots=258",
    ),
    (
      {"placement.decode.data": "3", "engine.slots": "96"},
      "engine.row_buckets[0]=32 does not divide over placement.decode.data *"
      " expert = 3; use engine.row_buckets[0]=33",
    ),
    (
      {"placement.decode.rules.mlp": "tensr"},
      "placement.decode.rules.mlp=tensr: a mesh has the axes data, expert,"
      " context, tensor; did you mean tensor?",
    ),
    (
      {"placement.learner.rules.mlp": "data"},
      "placement.learner.rules.mlp and placement.learner.rules.embed are both"
      " data, but there are parameters of axes (experts, mlp, embed); set one"
      " of the two to none",
    ),
    # The kernel takes blocks of 128 tokens.
    (
      {"model.compute.attention": "splash", "batch.length": "60"},
      "model.compute.attention=splash with batch.length=60 and"
      " batch.share_prompts=false needs rows of 128 tokens, not 60; pad, or"
      " use auto, reference or blockwise",
    ),
    (
      {
        "model.compute.attention": "splash",
        "batch.length": "128",
        "batch.share_prompts": "true",
      },
      "model.compute.attention=splash with batch.length=128 and"
      " batch.share_prompts=true knows no shared prompts; use auto",
    ),
    (
      {"placement.platform": "cuda"},
      "placement.platform=cuda is unknown; use cpu, gpu, tpu or none; did you"
      " mean gpu?",
    ),
    ({"rounds": "0", "warm_start": "none"}, "rounds=0 must be at least 1"),
    (
      {"evaluation.temperature": "-1"},
      "evaluation.temperature=-1.0 must be a finite",
    ),
    (
      {"evaluation.temperature": "inf"},
      "evaluation.temperature=inf must be a finite",
    ),
    ({"evaluation.success": "nan"}, "evaluation.success=nan must be a number"),
    ({"seed": "-1"}, "seed=-1 must be in [0, 4294967295]"),
    ({"seed": "4294967296"}, "seed=4294967296 must be in [0, 4294967295]"),
    # An episode: 8 turns and a start of at most 60 s; three calls of a reward,
    # 30 s each, with waits of 0.5 and 1 s between them.
    (
      {"progress_timeout_s": "631"},
      "progress_timeout_s=631 is below the 631.5 s that an episode may take",
    ),
    (
      {"progress_timeout_s": "nan"},
      "progress_timeout_s=nan is below the 631.5 s",
    ),
    (
      {"rollout.step_s": "1000"},
      "progress_timeout_s=1500 is below the 9091.5 s that an episode may take",
    ),
    (
      {"rollout.grading.attempts": "1", "progress_timeout_s": "569"},
      "progress_timeout_s=569 is below the 570 s that an episode may take",
    ),
    # 16 groups a round in micro-batches of 8: the first trains too early.
    (
      {"algorithm.advantage": "reinforce_pp"},
      "algorithm.advantage=reinforce_pp with overlap.groups_per_microbatch=8:"
      " gradients accumulate before all groups that it compares are ready; use"
      " groups_per_microbatch=16",
    ),
    (
      {
        "algorithm.advantage": "reinforce",
        "algorithm.dynamic_sampling": "dynamic_sampling",
      },
      "algorithm.dynamic_sampling=dynamic_sampling: advantage=reinforce "
      "compares no members, so groups of equal rewards teach as others do; use "
      "dynamic_sampling=none",
    ),
    (
      {"rollout.overlong": "overlong(max_tokens=33, buffer=4)"},
      "rollout.overlong.max_tokens=33 with max_tokens=32: no episode would"
      " ever be that long; lower the first",
    ),
    (
      {"routing.default": "bandwith", "placement.decode_kind": "bandwidth"},
      "routing.default=bandwith names neither a pool nor a kind; there are "
      "decode (bandwidth); did you mean bandwidth?",
    ),
  ],
)
def test_settings_that_do_not_fit_together_say_what_would(
  experiment, overrides, message
):
  with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
    _override(experiment, overrides).validate()


@pytest.mark.parametrize(
  ("rows", "shards", "tail"),
  [
    (32, 1, 8),
    (10, 1, 3),
    (2, 1, 1),
    (1, 1, None),
    (8, 2, 2),
    (16, 8, 8),
    (8, 8, None),
  ],
)
def test_a_tail_is_a_quarter_that_divides_over_the_shards(rows, shards, tail):
  shape = experiment_lib.BatchShape(rows=rows)
  assert shape.tail(shards) == tail
  for own in (None, 1):
    assert dataclasses.replace(shape, tail_rows=own).tail(shards) == own


def test_a_tail_that_is_no_number_is_refused_in_python_too():
  unknown: Any = "half"
  with pytest.raises(ValueError, match=r'tail_rows=half: use "auto", a number'):
    experiment_lib.BatchShape(tail_rows=unknown).validate()


def test_every_part_is_validated_once_from_the_file_to_the_run(monkeypatch):
  def parts(node):
    yield node
    for field in dataclasses.fields(node):
      if dataclasses.is_dataclass(child := getattr(node, field.name)):
        yield from parts(child)

  counts = collections.Counter()

  def counted(own):
    def validate(part):
      counts[id(part)] += 1
      own(part)

    return validate

  file = "configs/guess_number_moe.py"
  for cls in {type(part) for part in parts(flags.load(file))}:
    if hasattr(cls, "validate") and cls is not experiment_lib.Experiment:
      monkeypatch.setattr(cls, "validate", counted(cls.validate))
  tree = flags.load(file)
  # As assemble.build does, for trees that no file was read for.
  tree.validate()
  checked = [part for part in parts(tree) if hasattr(part, "validate")]
  # A default that two parts share is validated once for each.
  places = collections.Counter(id(part) for part in checked[1:])
  assert {key: counts[key] for key in places} == places


@pytest.mark.parametrize(
  "schedule",
  [
    overlap.sync(16),
    overlap.sync(16, 4),
    overlap.strict_pipeline(16),
    overlap.rollout_pipe(16, 4),
    overlap.rollout_pipe(16, 4, hard=True),
    overlap.one_step_off(16),
    overlap.bounded(16, 3),
    overlap.in_flight(16),
    overlap.in_flight(16, 3, on_publish="keep_kv"),
  ],
)
def test_every_preset_is_a_schedule_that_runs_and_can_be_written(
  experiment, schedule
):
  tree = dataclasses.replace(experiment, overlap=schedule)
  tree.validate()
  text = json.dumps(overrides_lib.to_json(tree))
  assert overrides_lib.from_json(json.loads(text)).overlap == schedule


@pytest.mark.parametrize(
  "schedule", [overlap.sync(16), overlap.sync(16, 4), overlap.sync(16, 1, 4)]
)
def test_a_round_that_is_waited_for_can_be_compared_as_a_whole(
  experiment, schedule
):
  algorithm = presets.Grpo(advantage=token_advantages.ReinforcePlusPlus())
  dataclasses.replace(
    experiment, overlap=schedule, algorithm=algorithm
  ).validate()


class Blunt(rewards.Outcome):
  """A reward that would need the environment."""

  @property
  def stateless(self):
    return False


def test_a_reward_that_needs_the_environment_is_refused(experiment):
  tree = dataclasses.replace(experiment, reward=Blunt())
  with pytest.raises(ValueError, match=r"^reward Blunt has stateless=False"):
    tree.validate()


def test_what_answers_from_elsewhere_does_not_go_with_a_repeatable_run(
  experiment,
):
  reward = process_pool.ProcessPool(reward=rewards.Outcome())
  there = dataclasses.replace(experiment, repeatable=True, reward=reward)
  with pytest.raises(ValueError, match="reward process_pool: it answers from"):
    there.validate()
  other = sglang_settings.SglangSettings()
  there = dataclasses.replace(experiment, repeatable=True, engine=other)
  with pytest.raises(ValueError, match="repeatable=true with engine="):
    there.validate()
  game = self_play.TwoPlayer()
  there = dataclasses.replace(experiment, repeatable=True, environment=game)
  with pytest.raises(ValueError, match="tictactoe-v0: its members wait for"):
    there.validate()
  place = placement.Placement(decode_processes=1)
  there = dataclasses.replace(experiment, repeatable=True, placement=place)
  with pytest.raises(ValueError, match=r"use placement\.decode_processes=0"):
    there.validate()
  there = dataclasses.replace(experiment, repeatable=True, placement=_APART)
  with pytest.raises(ValueError, match=r"learner_processes=2: .* use 1, or"):
    there.validate()
  learning = affinity.Routing(learn=True)
  there = dataclasses.replace(experiment, repeatable=True, routing=learning)
  with pytest.raises(ValueError, match=r"use routing\.learn=false, or repea"):
    there.validate()
  dataclasses.replace(experiment, repeatable=True).validate()


def test_a_repeatable_run_cannot_hold_its_weights_back(experiment):
  # Its checkpoint has the newest weights, and a restart serves them.
  pause = metric_bounds.Bound(limit=1.0, then="pause")
  bounds = metric_bounds.MetricBounds(kl=pause)
  held = dataclasses.replace(experiment, repeatable=True, bounds=bounds)
  with pytest.raises(ValueError, match=r"with bounds\.kl\.then=pause: a res"):
    held.validate()
  dataclasses.replace(held, repeatable=False).validate()


@pytest.mark.parametrize(
  ("engine", "out"),
  [
    (engine_settings.EngineSettings(slots=4), "use engine.record_experts=true"),
    (
      sglang_settings.SglangSettings(),
      "use engine=built_in(record_experts=true)",
    ),
  ],
)
def test_the_way_to_recorded_experts_keeps_an_engine_that_can(
  experiment, engine, out
):
  rollout = dataclasses.replace(experiment.rollout, record_experts=True)
  settings = dataclasses.replace(experiment, rollout=rollout, engine=engine)
  with pytest.raises(ValueError, match=f"{re.escape(out)}$"):
    settings.validate()


def test_engines_that_hand_over_nothing_encode_for_nobody(experiment):
  pool = placement.DecodePool(name="encode", role="prefill", processes=1)
  place = placement.Placement(decode_processes=1, more=(pool,))
  phased = dataclasses.replace(experiment, placement=place)
  phased.validate()
  engines = (
    (sglang_settings.SglangSettings(), "engine=sglang hand over no keys"),
    (
      engine_settings.EngineSettings(record_experts=True),
      "record experts, which are not handed over; use role=decode, or",
    ),
  )
  for engine, words in engines:
    with pytest.raises(ValueError, match=words):
      dataclasses.replace(phased, engine=engine).validate()
  (source, *_) = phased.sources
  for routing, words in (
    (
      affinity.Routing(min_prefill_ids=0),
      "routing.min_prefill_ids=0 must be at least 1",
    ),
    (
      affinity.Routing(prefer={source.name: "encode"}),
      "=encode names neither a pool nor a kind; there are decode",
    ),
  ):
    wrong = dataclasses.replace(phased, routing=routing)
    with pytest.raises(ValueError, match=words):
      wrong.validate()


@pytest.mark.process
def test_an_engine_must_be_installed_where_it_runs(experiment, tmp_path):
  found = tmp_path / "python"
  found.write_text("#!/bin/sh\n")
  found.chmod(0o755)
  lacking = tmp_path / "other"
  lacking.write_text("#!/bin/sh\ncase $3 in sgl_jax) echo sgl_jax ;; esac\n")
  lacking.chmod(0o755)
  experiment = dataclasses.replace(
    experiment, engine=sglang_settings.SglangSettings()
  )

  def run_by(python):
    place = placement.Placement(decode_processes=1, decode_python=str(python))
    dataclasses.replace(experiment, placement=place).validate_installed()

  run_by(found)
  with pytest.raises(
    ValueError, match=r"engine=sglang needs sgl_jax: .*/other -m pip"
  ):
    run_by(lacking)


def test_a_source_whose_tasks_are_not_named_for_it_is_refused(experiment):
  game = fakes.Counting(name="mine")
  renamed = delayed.Delayed(
    source=mixture.Mixture((mixture.Part(game), mixture.Part(fakes.Counting())))
  )
  tree = dataclasses.replace(experiment, environment=renamed)
  with pytest.raises(ValueError, match=r"mine\+counting made task mine/"):
    tree.validate_tasks()


_APART = placement.Placement(
  learner=placement.MeshSpec(data=2), learner_processes=2, platform="cpu"
)


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"optimizer_memory": "host"}, "optimizer_memory=host with .*use device"),
    (
      {
        "algorithm": presets.ReinforcePlusPlus(
          reference=references.Initial(memory="host")
        )
      },
      "algorithm.reference.memory=host with .*use device, or placement",
    ),
  ],
)
def test_a_learner_of_several_processes_keeps_nothing_on_the_host(
  experiment, changes, words
):
  apart = dataclasses.replace(experiment, placement=_APART)
  apart.validate()
  with pytest.raises(ValueError, match=words):
    dataclasses.replace(apart, **changes).validate()


def test_a_source_without_what_a_run_asks_of_it_is_named(experiment):
  nameless = dataclasses.make_dataclass(
    "Riddles", (), frozen=True, namespace={"task": fakes.Counting.task}
  )
  tree = dataclasses.replace(experiment, environment=nameless())
  message = "environment Riddles has no name, __call__; see envs.base.Source"
  with pytest.raises(ValueError, match=re.escape(message)):
    tree.validate()


def test_a_source_that_no_reward_grades_is_refused(experiment):
  games = [fakes.Counting(name=name) for name in ("sums", "rhymes")]
  rule = mixture.RewardRule("sums", rewards.Outcome())
  tree = dataclasses.replace(
    experiment,
    environment=mixture.Mixture(tuple(mixture.Part(game) for game in games)),
    reward=mixture.ByTask((rule,)),
  )
  with pytest.raises(
    ValueError, match=r"^no reward grades task rhymes/train/0"
  ):
    tree.validate()
  graded = mixture.ByTask((rule,), default=rewards.Outcome())
  dataclasses.replace(tree, reward=graded).validate()
  with pytest.raises(
    ValueError, match=r"^no reward grades task rhymes/train/0"
  ):
    dataclasses.replace(tree, environment=games[1]).validate()


def test_a_preference_for_a_pool_that_does_not_exist_is_refused(experiment):
  second = placement.DecodePool(name="cheap", kind="bandwidth")
  where = dataclasses.replace(experiment.placement, more=(second,))

  def preferring(pool):
    routing = affinity.Routing(prefer={"guess_number": pool})
    return dataclasses.replace(experiment, placement=where, routing=routing)

  for pool in ("cheap", "bandwidth", "decode", "any"):
    preferring(pool).validate()
  words = "routing.prefer.guess_number=cheep names neither a pool nor a kind; "
  words += "there are decode (any), cheap (bandwidth); did you mean cheap?"
  with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
    preferring("cheep").validate()


@pytest.mark.parametrize(
  ("path", "text"),
  [
    ("model.num_layers", "0"),
    ("rollout.max_turns", "0"),
    ("engine.slots", "0"),
    ("overlap.max_staleness", "-1"),
    ("overlap.groups_per_round", "0"),
    ("overlap.redundancy.extra_members", "-1"),
    ("placement.learner.data", "0"),
    ("warm_start.steps", "0"),
    ("rounds", "-1"),
    ("batch.rows", "0"),
    ("batch.tail_rows", "0"),
    ("evaluation.every", "-1"),
    ("evaluation.episodes", "-1"),
    ("optimizer.schedule.warmup_updates", "-4"),
    ("retention.checkpoint_every", "0"),
    ("retention.checkpoints", "0"),
    ("retention.episodes_every", "0"),
  ],
)
def test_every_part_of_the_tree_is_checked_and_named(experiment, path, text):
  with pytest.raises(
    ValueError, match=rf"^{re.escape(path)}={text} (must be at|is below)"
  ):
    _override(experiment, {path: text}).validate()


def test_policy_and_teacher_have_the_dtype_of_the_devices(experiment):
  teacher = references.Teacher(model=experiment.model, directory="teacher")
  algorithm = dataclasses.replace(experiment.algorithm, reference=teacher)
  taught = dataclasses.replace(experiment, algorithm=algorithm)
  for dtype in get_args(model_config.Dtype):
    placed = taught.with_auto_dtype(dtype)
    assert placed.model.compute.dtype == dtype
    assert placed.algorithm.reference.model.compute.dtype == dtype
    # Nothing is left to be found out, wherever the run goes on.
    assert placed.with_auto_dtype("float32") is placed
  # The engine's log-probabilities are as far from the learner's as bfloat16's.
  rounded = taught.with_auto_dtype("bfloat16")
  limit = rounded.resolved_bounds.logprob_gap.limit
  assert limit == metric_bounds.GAPS["bfloat16"]


def test_json_makes_an_equal_experiment(experiment):
  changed = _override(
    experiment,
    {"algorithm.advantage": "reinforce(baseline=0.5)"},
  )
  for tree in (experiment, changed):
    text = json.dumps(overrides_lib.to_json(tree))
    assert overrides_lib.from_json(json.loads(text)) == tree
  assert changed != experiment


def test_the_tokenizer_has_the_words_of_the_environment(experiment):
  assert experiment.build_chat().words == tuple(experiment.environment.words)
