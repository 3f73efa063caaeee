"""The settings of a run: one typed, frozen tree, checked as a whole."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Sequence
from typing import Any, Literal, cast

from envs import base
from models import config as model_config
from models import policy as policy_lib
from models import sharding
from models.attention import backend
from models.hf import config as hf_config
from models.hf import load
from rl.algorithms import presets, references
from rl.engine import contract
from rl.engine.builtin import settings as engine_settings
from rl.engine.sglang import settings as sglang_settings
from rl.loop import fine_tuning, metric_bounds, trackers
from rl.loop import warm_start as warm_start_lib
from rl.pools import affinity, weight_transfer
from rl.pools import placement as placement_lib
from rl.pools import recovery as recovery_lib
from rl.rollout import chats, episode, grading, group_rollout, prompts
from rl.runtime import segments
from rl.schedule import overlap as overlap_lib
from rl.settings import checks, overrides, short_names
from rl.train import optimizers


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchShape:
  """Shape of every packed micro-batch.

  Attributes:
    rows: number of rows, split over the learner's data axis.
    tail_rows: number of rows of the last batches of an update, if that leaves
      less empty; these are another program. "auto" is a quarter of `rows`,
      rounded up to a multiple of the data axis. None gives all batches the same
      shape.
    length: tokens of a row; the longest episode must fit.
    share_prompts: stores the context that members of a group share once per
      row. Worth it when prompts are long compared with the answers, as
      `benchmarks/packing.py` shows; rows should then hold several members.
  """

  rows: int = 32
  length: int = 64
  tail_rows: int | Literal["auto"] | None = "auto"
  share_prompts: bool = False

  def tail(self, shards: int) -> int | None:
    """Returns the rows of the last batches of an update; None is as all others.

    Args:
      shards: that their rows are split into.
    """
    if self.tail_rows != "auto":
      return self.tail_rows
    quarter = -(-self.rows // (4 * shards)) * shards
    return quarter if quarter < self.rows else None

  def validate(self) -> None:
    """Raises ValueError unless 1 <= tail_rows < rows."""
    checks.at_least(self, 1, "rows", where="batch")
    if self.tail_rows in ("auto", None):
      return
    if isinstance(self.tail_rows, str):
      checks.refuse(
        self, "tail_rows", why='use "auto", a number or none', where="batch"
      )
    checks.at_least(self, 1, "tail_rows", where="batch")
    if self.tail_rows >= self.rows:
      why = "a tail has fewer rows; use fewer, or none"
      checks.refuse(self, "tail_rows", "rows", why=why, where="batch")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
  """Held-out tasks, played by the weights that were just published.

  Attributes:
    every: rounds between evaluations; 0: only before and after the run.
    episodes: one per task, or several if there are fewer rows; 0: none.
    temperature: of sampling; 0 is greedy.
    success: an episode succeeds from this reward on.
  """

  every: int = 25
  episodes: int = 200
  temperature: float = 1.0
  success: float = 1.0

  def validate(self) -> None:
    """Raises ValueError on a number outside its range."""
    checks.at_least(self, 0, "every", "episodes")
    checks.finite_at_least(self, 0, "temperature")
    checks.not_nan(self, "success")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retention:
  """Checkpoints and records to keep on disk.

  Attributes:
    checkpoint_every: rounds between checkpoints.
    checkpoints: how many are kept.
    episodes_every: rounds between samples of trajectories.
    episodes: how many trajectories are kept, the newest.
    skipped: how many skipped updates are kept, the newest, each with a copy of
      the parameters. The default is as many as end a run.
    segment_bytes: size at which events.jsonl and spans.jsonl are compressed
      into events/ and spans/, and begin anew.
    log_bytes: size of either log on disk, beyond which its oldest segments are
      deleted; of events once they are checked and no restart needs them.
  """

  checkpoint_every: int = 25
  checkpoints: int = 2
  episodes_every: int = 10
  episodes: int = 1000
  skipped: int = 3
  segment_bytes: int = segments.MAX_BYTES
  log_bytes: int = 1 << 30

  def validate(self) -> None:
    """Raises ValueError on a number below 1."""
    checks.at_least(self, 1, *(f.name for f in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
  """Everything that decides a run.

  The polymorphic parts are the callables themselves: `environment`, `reward`,
  `algorithm` with its `advantage` and `loss`, and `optimizer`.

  Attributes:
    environment: the source of tasks, and of an environment for each.
    reward: grades episodes that have ended.
    tasks: number and order of the training tasks.
    algorithm: from rewards to the objective; a preset, or parts of one.
    optimizer_memory: "host" keeps moments and master copies in host memory
      between updates, which leaves room on the device for the activations of
      long rows.
    max_skipped: allowed number of updates in a row that are skipped because a
      loss or gradient is not finite; one more ends the run, as do as many
      rounds that train nothing because of faults. Batches of such updates stay
      in `skipped/` of the run, for `launch.replay`.
    bounds: metrics that warn, or end the run, when they drift.
    routing: the choice of a decode pool for a conversation.
    recovery: restarts of lost engines.
    initial: directory of a Hugging Face checkpoint with the initial
      parameters; None draws them from the seed.
    chat: the tokenizer and chat template. None takes those of `initial`, or
      without one the words of the environment.
    seed: decides initial parameters, task order and sampling noise.
    rounds: length of the run, in publishes; 0 is only the warm start.
    warm_start: supervised steps before the first round, on demonstrations or on
      recorded conversations, or None.
    data: a file of rows that replaces `environment.rows.data`, or None.
    progress_timeout_s: a longer wait inside the loop ends the run, with a
      table of all waits. During an evaluation: the longest time without the
      end of an episode.
    repeatable: makes the order of all events follow from the settings and the
      seed, at some cost in time; see `rl.runtime.logical_clock`. Two runs on
      machines with the same devices then end with the same parameters, bit for
      bit, whether they were killed or not.
    tracker: a service that gets the metrics as well, or None. metrics.jsonl and
      the files of TensorBoard are always written.
    log_startup: prints, after the first round, the seconds of each phase of the
      start.
  """

  environment: base.Source
  reward: base.Reward
  model: model_config.ModelConfig
  rollout: group_rollout.Rollout = group_rollout.Rollout()
  engine: (
    engine_settings.EngineSettings
    | sglang_settings.SglangSettings
    | contract.EngineSpec
  ) = engine_settings.EngineSettings()
  publishing: weight_transfer.Publishing = weight_transfer.Publishing()
  overlap: overlap_lib.Overlap = overlap_lib.Overlap()
  placement: placement_lib.Placement = placement_lib.Placement()
  routing: affinity.Routing = affinity.Routing()
  recovery: recovery_lib.Recovery = recovery_lib.Recovery()
  tasks: prompts.TaskOrder = prompts.TaskOrder()
  algorithm: presets.Named = presets.Grpo()
  optimizer: optimizers.Optimizer = optimizers.AdamW()
  optimizer_memory: references.Memory = "device"
  batch: BatchShape = BatchShape()
  initial: str | None = None
  chat: chats.Words | chats.Hf | None = None
  data: str | None = None
  warm_start: warm_start_lib.WarmStart | fine_tuning.FineTuning | None = None
  evaluation: Evaluation = Evaluation()
  retention: Retention = Retention()
  bounds: metric_bounds.MetricBounds = metric_bounds.MetricBounds()
  seed: int = 0
  rounds: int = 100
  max_skipped: int = 2
  progress_timeout_s: float = 1500.0
  repeatable: bool = False
  tracker: (
    trackers.WeightsAndBiases | trackers.MLflow | trackers.TrackerSpec | None
  ) = None
  log_startup: bool = False

  def __post_init__(self) -> None:
    """Gives the rows of the environment their data."""
    if self.data is None:
      return
    rows = getattr(self.environment, "rows", None)
    if not dataclasses.is_dataclass(rows):
      raise ValueError(
        f"environment {self.environment.name} has no rows; use one of "
        "envs.recordings, or envs.single_turn"
      )
    changes: Any = {"data": self.data}
    replaced: Any = {"rows": dataclasses.replace(cast(Any, rows), **changes)}
    environment = dataclasses.replace(cast(Any, self.environment), **replaced)
    object.__setattr__(self, "environment", environment)

  def build_chat(self, run_dir: pathlib.Path | None = None) -> episode.Chat:
    """Returns the tokenizer with its chat template; see `chats.build`."""
    if run_dir is not None:
      return chats.build(self.chosen_chat, self.environment, run_dir)
    return self._chat

  @functools.cached_property
  def _chat(self) -> episode.Chat:
    # A tokenizer of 150,000 words takes a second to read.
    return chats.build(self.chosen_chat, self.environment, None)

  @property
  def chosen_chat(self) -> chats.ChatSetting:
    """The chat of the run; see `chats.choose`."""
    return chats.choose(self.chat, self.initial)

  @property
  def resolved_bounds(self) -> metric_bounds.MetricBounds:
    """The bounds on metrics, all with their limits."""
    return self.bounds.resolved(
      compute=self.model.dtype,
      published=self.publishing.dtype,
      on_publish=self.overlap.on_publish,
    )

  @property
  def sources(self) -> Sequence[base.Source]:
    """The sources of tasks: the parts of a mixture, or one."""
    return prompts.sources_of(self.environment)

  @property
  def decodes(self) -> bool:
    """Returns whether an engine starts; not if the warm start is all."""
    return self.rounds > 0 or self.evaluation.episodes > 0

  def with_auto_dtype(self, dtype: model_config.Dtype) -> "Experiment":
    """Returns the settings with a dtype in the place of "auto"."""
    algorithm, teacher = self.algorithm, self.algorithm.reference
    if isinstance(teacher, references.Teacher):
      model = teacher.model.with_auto_dtype(dtype)
      teacher = dataclasses.replace(teacher, model=model)
      algorithm = dataclasses.replace(algorithm, reference=teacher)
    model = self.model.with_auto_dtype(dtype)
    # An instance keeps what it has checked and built.
    if (model, algorithm) == (self.model, self.algorithm):
      return self
    return dataclasses.replace(self, model=model, algorithm=algorithm)

  def validate(self) -> None:
    """Raises ValueError on a setting that cannot work; touches no device.

    Checks each part once, however often it is called: by the command line, and
    by `assemble` for a tree that was built in Python. The checkpoints of
    `initial` and of a teacher are left to `validate_initial` and
    `validate_teacher`, as only a run that trains needs them.
    """
    _ = self._is_valid

  @functools.cached_property
  def _is_valid(self) -> bool:
    checks.validate_parts(self)
    for source in self.sources:
      base.check_source(source)
    grading.refuse_stateful(self.reward)
    self._validate_repeatable()
    self._validate_learner_processes()
    self._validate_counts()
    self._validate_partners()
    self._validate_engines()
    self._validate_schedule()
    self._validate_demonstrations()
    self._validate_waits()
    self._validate_lengths()
    self._validate_divisions()
    self._validate_attention()
    self.engine.validate_model(self.model)
    self._validate_experts()
    return True

  def validate_teacher(self) -> None:
    """Raises ValueError when there is a teacher that cannot be used."""
    if isinstance(self.algorithm.reference, references.Teacher):
      self.algorithm.reference.check()

  def validate_initial(self) -> None:
    """Raises ValueError when the weights to begin with cannot be used.

    Reads headers and config.json only; touches no device.
    """
    try:
      if self.initial is not None:
        load.check(self.initial, self.model)
    except load.Unusable as error:
      raise ValueError(f"initial={error}") from error
    self.build_chat()

  def validate_installed(self) -> None:
    """Raises ValueError when a package is missing where it is needed.

    These are packages of engines, and of environments that would import theirs
    in each episode, which would end in a fault.
    """
    checks.validate_installed(self.environment)
    self.placement.validate_installed()
    for python in {pool.python for pool in self.placement.pools}:
      self.engine.validate_installed(python)

  def validate_tasks(self) -> None:
    """Raises ValueError for a source whose first task is not named for it.

    Needs the data of the tasks, which a trained policy is used without.
    """
    for source in self.sources:
      task = prompts.task_of(source, 0, "train")
      prompts.check_id(task, source.name)

  def _validate_experts(self) -> None:
    recorded = getattr(self.engine, "record_experts", False)
    if self.rollout.record_experts and not recorded:
      can = hasattr(self.engine, "record_experts")
      field = "record_experts=true"
      out = f"engine.{field}" if can else f"engine=built_in({field})"
      why = f"it records none; use {out}"
      checks.refuse(self, "rollout.record_experts", "engine", why=why, where="")

  def _validate_counts(self) -> None:
    checks.at_least(self, 0 if self.warm_start else 1, "rounds", where="")
    checks.at_least(self, 0, "max_skipped", where="")
    # jax would take a larger seed modulo 2**32.
    checks.within(self, 0, 2**32 - 1, "seed", where="")
    advantage = self.algorithm.advantage
    if advantage.pool == "group":
      least = advantage.min_group_size
      bound = f"the {least} that {short_names.of(advantage)} compares"
      out = "raise it or use algorithm.advantage=reinforce"
      members = self.rollout.group_size
      checks.enough("rollout.group_size", members, least, bound, out)
    if base.compares(self.reward):
      bound = f"the 2 that reward {short_names.of(self.reward)} compares"
      members = self.rollout.group_size
      checks.enough("rollout.group_size", members, 2, bound, "raise it")

  def _validate_partners(self) -> None:
    """Raises where members that play each other would miss a partner."""
    for source in self.sources:
      together = base.members_together(source)
      if self.rollout.group_size % together:
        raise ValueError(
          f"rollout.group_size={self.rollout.group_size}: {source.name} plays "
          f"{together} members together; use a multiple of that"
        )
      if together > 1 and (extra := self.overlap.redundancy.extra_members):
        raise ValueError(
          f"overlap.redundancy.extra_members={extra}: members of {source.name} "
          "play each other, so none of them is redundant; use 0"
        )

  def _validate_engines(self) -> None:
    """Raises where some engines could never have an episode to play."""
    members = self.rollout.group_size + self.overlap.redundancy.extra_members
    episodes = self.overlap.max_groups_in_play * members
    infos = self.placement.engine_infos
    engines = sum(info.role == "decode" for info in infos)
    able = self.engine.capabilities(self.model)
    if engines < len(infos) and not able.prefixes:
      raise ValueError(
        "a pool of placement.more has role=prefill, but engines of "
        f"engine={short_names.of(self.engine)} hand over no keys and values, "
        "or record experts, which are not handed over; use role=decode, or "
        "engine=built_in(record_experts=false)"
      )
    if engines > episodes:
      raise ValueError(
        f"placement.replicas={self.placement.replicas} makes {engines} "
        f"engines, but {episodes} episodes at most are played at once, of "
        f"{members} members a group, and the other engines would be idle; use "
        f"{episodes} engines or fewer, or raise overlap.groups_per_round or "
        "rollout.group_size"
      )

  def _validate_schedule(self) -> None:
    """Raises when parts of a run that are fine alone do not go together."""
    self.algorithm.validate_schedule(self.overlap)
    self.algorithm.validate_model(self.model)
    if (check_task := getattr(self.reward, "check_task", None)) is not None:
      for source in self.sources:
        check_task(prompts.task_of(source, 0, "train"))
    overlong = self.rollout.overlong
    if overlong is not None and overlong.max_tokens > self.rollout.max_tokens:
      why = "no episode would ever be that long; lower the first"
      checks.refuse(self.rollout, "overlong.max_tokens", "max_tokens", why=why)
    self.routing.validate_domains([source.name for source in self.sources])
    pools = [pool for pool in self.placement.pools if pool.role == "decode"]
    self.routing.validate_pools({pool.name: pool.kind for pool in pools})

  def _validate_demonstrations(self) -> None:
    if isinstance(self.warm_start, fine_tuning.FineTuning):
      fine_tuning.recorded(self.environment, self.warm_start)
    elif self.warm_start is not None:
      prompts.demonstrator(self.environment)

  def _validate_waits(self) -> None:
    limits = self.rollout
    episode_s = (limits.max_turns + 1) * limits.step_s
    episode_s += limits.grading.longest_s(limits.grading.deadline_s)
    if any(base.restarts(one, one.name) for one in self.sources):
      episode_s += limits.starting.longest_s(limits.step_s) - limits.step_s
    given = self.progress_timeout_s
    bound = f"the {episode_s:g} s that an episode may take"
    out = "raise it or lower rollout.max_turns, step_s, grading or starting"
    checks.enough("progress_timeout_s", given, episode_s, bound, out)
    deadline_s = limits.grading.deadline_s
    for part in base.parts(self.reward):
      timeout_s = getattr(part, "timeout_s", 0.0)
      bound = f"timeout_s={timeout_s:g} of reward {short_names.of(part)}"
      out = "raise it, or the error of a slow call would not name the URL"
      where = "rollout.grading.deadline_s"
      checks.enough(where, deadline_s, timeout_s, bound, out)

  def _validate_repeatable(self) -> None:
    """Refuses what answers at times of its own; see `logical_clock`."""
    if not self.repeatable:
      return
    out = "use repeatable=false"
    if not isinstance(self.engine, engine_settings.EngineSettings):
      why = "its scheduler has a clock of its own"
      names = "repeatable", "engine"
      checks.refuse(
        self, *names, why=why, out=f"{out}, or the built-in engine", where=""
      )
    if self.placement.remote:
      raise ValueError(
        "repeatable=true with engines in processes of their own, which answer "
        "at times of their own; use placement.decode_processes=0, and 0 of "
        f"every other pool, or {out.removeprefix('use ')}"
      )
    if (count := self.placement.learner_processes) > 1:
      raise ValueError(
        f"repeatable=true with placement.learner_processes={count}: processes "
        f"answer at times of their own; use 1, or {out.removeprefix('use ')}"
      )
    for field in dataclasses.fields(self.bounds):
      bound = getattr(self.bounds, field.name)
      if bound is not None and bound.then == "pause":
        raise ValueError(
          f"repeatable=true with bounds.{field.name}.then=pause: a restart "
          "publishes what was held back; use warn or stop, or "
          f"{out.removeprefix('use ')}"
        )
    if self.routing.learn:
      raise ValueError(
        "repeatable=true with routing.learn=true: a restart begins to learn "
        f"anew; use routing.learn=false, or {out.removeprefix('use ')}"
      )
    for source in self.sources:
      if base.members_together(source) > 1:
        raise ValueError(
          f"repeatable=true with environment {source.name}: its members wait "
          f"for each other, so none can be held for a checkpoint; {out}"
        )
    for part in base.parts(self.reward):
      if isinstance(part, base.Offloaded):
        raise ValueError(
          f"repeatable=true with reward {short_names.of(part)}: it answers "
          f"from elsewhere, at times of its own; {out}"
        )

  def _validate_learner_processes(self) -> None:
    """Refuses what a learner of several processes cannot do yet."""
    count = self.placement.learner_processes
    reference = getattr(self.algorithm.reference, "memory", None)
    for name, value, out in (
      ("optimizer_memory", self.optimizer_memory, "device"),
      ("algorithm.reference.memory", reference, "device"),
      ("model.compute.remat", self.model.remat, "layer"),
    ):
      if count > 1 and value == "host":
        raise ValueError(
          f"{name}=host with placement.learner_processes={count}: its "
          f"processes keep everything on their devices so far; use {out}, or "
          "placement.learner_processes=1"
        )

  def _validate_lengths(self) -> None:
    self._validate_vocabulary()
    longest, allows = self.rollout.max_tokens, ""
    if self.initial is not None:
      allows = f" if config.json of initial={self.initial} allows it"
    bound = f"rollout.max_tokens={longest}; an episode would not fit"
    for setting, room, condition in (
      ("model.max_length", self.model.max_length, allows),
      ("batch.length", self.batch.length, ""),
    ):
      out = f"lower rollout.max_tokens to {room}, or use {longest} or more"
      checks.enough(setting, room, longest, bound, out + condition)

  def _validate_vocabulary(self) -> None:
    """Raises when the model has too few ids.

    A directory that is missing is left to `validate_initial`: a run that goes
    on has its own copy.
    """
    chosen, initial = self.chosen_chat, self.initial
    directory = getattr(chosen, "directory", initial)
    if directory is not None and not os.path.isdir(directory):
      return
    ids = self.build_chat().vocab_size
    if isinstance(chosen, chats.Words):
      bound = f"the {ids} ids that the words of {self.environment.name} make"
      fewer = "take an environment of fewer words"
    else:
      bound = f"the {ids} ids of the tokenizer in {directory}"
      fewer = "use the tokenizer that belongs to it"
    out = f"use {ids} or more"
    if initial is not None and self.model.vocab_size < ids:
      out = _larger_model(initial, ids, fewer)
    checks.enough("model.vocab_size", self.model.vocab_size, ids, bound, out)

  def _validate_divisions(self) -> None:
    learner = self.placement.learner.plan
    parts = learner.num_batch
    rows = {"batch.rows": self.batch.rows}
    if isinstance(tail := self.batch.tail_rows, int):
      if self.batch.rows == parts:
        over = f"placement.learner.data * expert = {parts}"
        why = f"no number below divides over {over}; use none"
        checks.refuse(self.batch, "tail_rows", "rows", why=why, where="batch")
      rows["batch.tail_rows"] = tail
    context = self.placement.learner.context
    if self.batch.length % context:
      fit = -(-self.batch.length // context) * context
      raise ValueError(
        f"batch.length={self.batch.length} does not divide over "
        f"placement.learner.context={context}; use batch.length={fit}"
      )
    axes = policy_lib.of(self.model).axes
    for name, mesh in self.placement.meshes.items():
      split = rows if name == "learner" else self.engine.split_rows
      where = f"placement.{name}"
      sharding.validate(self.model, axes, mesh.plan, rows=split, where=where)
    # A teacher scores where the learner learns.
    if isinstance(reference := self.algorithm.reference, references.Teacher):
      axes = policy_lib.of(reference.model).axes
      where = "algorithm.reference on placement.learner"
      sharding.validate(reference.model, axes, learner, where=where)

  def _validate_attention(self) -> None:
    """Raises when a forced form of attention cannot learn."""
    models = {"model": self.model}
    if isinstance(reference := self.algorithm.reference, references.Teacher):
      models["algorithm.reference.model"] = reference.model
    for name, model in models.items():
      form, batch = model.compute.attention, self.batch
      if form in backend.CHOSEN:
        continue
      case = backend.Case(
        batch=batch.rows,
        queries=batch.length,
        keys=batch.length,
        heads=model.num_heads,
        head_dim=model.head_dim,
        dtypes=frozenset({model.dtype}),
        parents=batch.share_prompts,
        windowed=model.window is not None,
      )
      if reason := backend.refusal(form, case):
        raise ValueError(
          f"{name}.compute.attention={form} with batch.length={batch.length} "
          f"and batch.share_prompts={str(batch.share_prompts).lower()} {reason}"
        )


def _larger_model(initial: str, ids: int, fewer: str) -> str:
  """Returns the way out for a model of fewer than `ids` that loads weights."""
  if hf_config.load(initial).vocab_size >= ids:
    return (
      "in the config file, take the model's sizes from initial: "
      f"model=models.hf.config.load({initial!r})"
    )
  return (
    f"initial={initial} has too few ids for them, so start from a checkpoint "
    f"with more, or {fewer}"
  )


def check_experiment(tree: object) -> None:
  """Raises SettingError unless the settings are of a training run."""
  if not isinstance(tree, Experiment):
    raise overrides.SettingError(
      "a training run takes a rl.experiment.Experiment, not "
      f"{type(tree).__name__}; use a file such as configs/guess_number_moe.py"
    )
