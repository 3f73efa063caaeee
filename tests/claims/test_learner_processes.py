"""A learner in two processes: the same run, and what becomes of a lost one."""

import asyncio
import dataclasses
import os
import pathlib
import shutil
import signal
from typing import Any

import jax
import numpy as np
import pytest

from models import config as model_config
from models import lora
from models import policy as policy_lib
from models.hf import export
from rl import assemble, initial_state
from rl import experiment as experiment_lib
from rl.algorithms import kl, presets, references
from rl.loop import warm_start
from rl.pools import placement, weight_transfer
from rl.remote import gang as gang_lib
from rl.runtime import checkpoint
from rl.schedule import overlap
from rl.train import learner, nonfinite_diagnosis, optimizers, skipped_updates
from tests.helpers import backends_under_test as under_test
from tests.helpers import counting_runs

pytestmark = pytest.mark.process

MODEL = model_config.tiny_moe(
  vocab_size=8, num_layers=1, d_model=32, max_length=16
)
_MESH = placement.MeshSpec(data=2, expert=2)


def experiment(processes=1, **changes):
  base = counting_runs.experiment(
    MODEL,
    placement=placement.Placement(
      learner=_MESH, platform="cpu", learner_processes=processes
    ),
    rounds=3,
  )
  return dataclasses.replace(base, **changes)


class Keeping(counting_runs.Watching):
  """Keeps metrics, and the tokens of the first round."""

  def __init__(self, parts, checkpoints):
    super().__init__()
    self._parts, self._checkpoints = parts, checkpoints
    self.tokens: list[list[int]] = []

  async def on_round(self, trained):
    await super().on_round(trained)
    if len(self.rounds) == 1:
      self.tokens = [
        turn.tokens.tolist()
        for group in trained.groups
        for member in group.trajectories
        for turn in member.turns
      ]

  async def on_boundary(self, progress):
    if self._checkpoints is not None:
      now = await initial_state.fetched(self._parts, progress)
      initial_state.save(self._checkpoints, now)


@dataclasses.dataclass
class Ran:
  """What a run has left."""

  rounds: list[Any]
  tokens: list[list[int]]
  params: dict[str, np.ndarray]


def run(settings, run_dir=None, saved=None) -> Ran:
  """Runs to the last round, from the newest of the checkpoints in `saved`."""

  async def all_of_it():
    parts = assemble.build(settings, run_dir)
    checkpoints = saved and checkpoint.Checkpoints(saved, keep=9)
    try:
      start = await counting_runs.begun(parts, checkpoints)
      kept = Keeping(parts, checkpoints)
      last = await assemble.coordinate(parts, kept).run(start)
      fetch = parts.programs.fetch
      params = await parts.learner_thread.run("fetch", fetch, last.params)
      return Ran(kept.rounds, kept.tokens, named(params))
    finally:
      if checkpoints:
        checkpoints.close()
      await parts.close()

  return asyncio.run(all_of_it())


def named(tree) -> dict[str, np.ndarray]:
  leaves = jax.tree.leaves_with_path(tree)
  return {jax.tree_util.keystr(x): np.asarray(y) for x, y in leaves}


def check_same(one: Ran, other: Ran, names=("loss", "grad_norm")):
  assert one.tokens == other.tokens
  for name in names:
    pairs = [[x[name] for x in ran.rounds] for ran in (one, other)]
    np.testing.assert_allclose(*pairs, rtol=1e-5, err_msg=name)
    assert any(pairs[0]), f"{name} is 0 in all rounds"


@pytest.mark.parametrize("number", [0, 1])
def test_a_process_that_is_killed_ends_all_and_is_named(number, tmp_path):
  place = placement.Placement(
    learner=placement.MeshSpec(data=2), platform="cpu", learner_processes=2
  )

  async def scenario():
    gang = gang_lib.of_learner(place, tmp_path, deadline_s=60)
    try:
      await gang.open()
      pids = [worker.pid for worker, _ in gang._members]
      os.kill(pids[number], signal.SIGKILL)
      with pytest.raises(learner.LearnerLost) as first:
        await gang.command("store", [("", ())] * 2)
      with pytest.raises(learner.LearnerLost) as second:
        await gang.command("store", [("", ())] * 2)
      return pids, str(first.value), str(second.value)
    finally:
      await gang.close()

  pids, first, second = asyncio.run(scenario())
  assert first.startswith(f"process {number} of the learner was lost ")
  assert f"learner {number} ended with code -9; its log, " in first
  assert second == first
  for pid in pids:
    assert not pathlib.Path(f"/proc/{pid}").exists()


_NOTHING_IS_COMPARED = """
from jax.experimental import multihost_utils

def refuse(*args, **kwargs):
  raise AssertionError("processes compare or gather what hosts have")

multihost_utils.assert_equal = multihost_utils.process_allgather = refuse
"""


@pytest.fixture(scope="module")
def twice(tmp_path_factory):
  """Two runs of the same settings, each in two processes."""
  directory = tmp_path_factory.mktemp("imported_first")
  (directory / "sitecustomize.py").write_text(_NOTHING_IS_COMPARED)
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("PYTHONPATH", str(directory))
    return run(experiment(2)), run(experiment(2))


@pytest.mark.slow
def test_two_processes_learn_what_one_with_as_many_devices_learns(twice):
  check_same(run(experiment()), twice[0])


@pytest.mark.slow
def test_two_runs_in_two_processes_are_equal_bit_for_bit(twice):
  one, other = twice
  assert one.tokens == other.tokens
  for name, leaf in one.params.items():
    np.testing.assert_array_equal(leaf, other.params[name], err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", under_test.EACH[1:])
def test_a_backend_starts_them_on_other_hosts_with_the_same_bits(
  twice, tmp_path, name
):
  with under_test.up(name, tmp_path) as backend:
    settings = experiment(2)
    place = dataclasses.replace(settings.placement, backend=backend)
    elsewhere = run(dataclasses.replace(settings, placement=place))
  here, _ = twice
  assert elsewhere.tokens == here.tokens
  for path, leaf in here.params.items():
    np.testing.assert_array_equal(leaf, elsewhere.params[path], err_msg=path)


@pytest.mark.slow
async def test_a_process_that_compiles_for_longer_is_waited_for():
  # It begins as much later than the other, which has all in its cache.
  late_s = 35.0
  async with counting_runs.built(experiment(2, rounds=1)) as parts:
    await parts.open()
    assert parts.gang is not None
    _, stream = parts.gang._members[1]
    call, waited = stream.call, []

    async def late(method, *args, **kwargs):
      if method == "accumulate" and not waited:
        waited.append(method)
        await asyncio.sleep(late_s)
      return await call(method, *args, **kwargs)

    stream.call = late
    start = await counting_runs.begun(parts)
    watching = counting_runs.Watching()
    await assemble.coordinate(parts, watching).run(start)
  assert (waited, len(watching.rounds)) == (["accumulate"], 1)


VARIANTS = {
  "recomputed, two epochs, first and later weights as reference": {
    "overlap": dataclasses.replace(overlap.sync(4), old_logprob="recompute"),
    "algorithm": presets.Grpo(
      epochs=2,
      kl=kl.KlPenalty(weight=1.0),
      reference=references.Initial(refresh_every=1),
    ),
  },
  "kept, a critic, Muon": {
    "overlap": dataclasses.replace(overlap.sync(4, 2), old_logprob="snapshot"),
    "algorithm": presets.Ppo(),
    "optimizer": optimizers.Muon(learning_rate=0.01),
  },
  "adapters, the base as reference": {
    "model": dataclasses.replace(MODEL, lora=lora.Lora(rank=2)),
    "algorithm": presets.Grpo(
      kl=kl.KlPenalty(weight=0.1), reference=references.Base()
    ),
  },
  "a warm start, bfloat16, a checksum of what engines serve": {
    "model": dataclasses.replace(
      MODEL, compute=model_config.Compute(dtype="bfloat16")
    ),
    "warm_start": warm_start.WarmStart(steps=3, episodes=4),
    "publishing": weight_transfer.Publishing(verify=True),
  },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_it_holds_for_all_that_a_learner_does(name):
  changes = VARIANTS[name] | {"rounds": 2}
  check_same(run(experiment(**changes)), run(experiment(2, **changes)))


@pytest.mark.slow
@pytest.mark.parametrize(
  "spec",
  [
    # Keys and values go round among devices of one process, and of two.
    placement.MeshSpec(data=2, context=2),
    placement.MeshSpec(context=2, tensor=2),
  ],
  ids=["within a process", "between two"],
)
def test_it_holds_where_devices_share_rows(spec):
  shape = experiment_lib.BatchShape(rows=8, length=16, share_prompts=True)
  one, two = (
    experiment(
      processes,
      rounds=2,
      batch=shape,
      placement=placement.Placement(
        learner=spec, platform="cpu", learner_processes=processes
      ),
    )
    for processes in (1, 2)
  )
  check_same(run(one), run(two))


@pytest.mark.slow
def test_it_holds_for_a_teacher(tmp_path):
  teacher = dataclasses.replace(MODEL, num_layers=2)
  params = policy_lib.of(teacher).init(jax.random.key(7))
  export.export(tmp_path / "teacher", params, teacher)
  reference = references.Teacher(
    model=teacher, directory=str(tmp_path / "teacher")
  )
  distill: Any = {"algorithm": presets.Distill(reference=reference)}
  distill["rounds"] = 2
  check_same(run(experiment(**distill)), run(experiment(2, **distill)))


@pytest.mark.slow
def test_a_skipped_update_changes_nothing_and_is_kept(tmp_path):
  # The loss of the routers overflows.
  settings = experiment(
    2,
    rounds=1,
    overlap=overlap.sync(4),
    algorithm=presets.Grpo(z_weight=3e38),
  )
  ran = run(settings, tmp_path)
  assert ran.rounds[0]["skipped_updates"] == 1
  (path,) = skipped_updates.updates(tmp_path / "skipped")
  alone = dataclasses.replace(settings, placement=placement.Placement())
  layout = alone.placement.layouts()[0]
  programs = assemble.learner_programs(alone, layout)
  kept = skipped_updates.read(path, programs.abstract)
  for name, leaf in named(kept.params).items():
    np.testing.assert_array_equal(leaf, ran.params[name], err_msg=name)
  found = nonfinite_diagnosis.outcome(programs, kept, kept.batches)
  assert not found.is_finite


@pytest.mark.slow
def test_a_run_goes_on_in_any_number_of_processes(tmp_path):
  # Adapters: what is frozen is made again, in the run's own process.
  model = dataclasses.replace(MODEL, lora=lora.Lora(rank=2))
  whole = run(experiment(2, model=model))
  saved = tmp_path / "checkpoints"
  run(experiment(2, model=model, rounds=2), saved=saved)
  files = {}
  for processes in (1, 2, 4):
    copy = tmp_path / f"{processes}"
    shutil.copytree(saved, copy)
    settings = experiment(processes, model=model)
    params = weights(settings, copy)
    target = tmp_path / f"export of {processes}"
    merged = lora.merge(params, model.lora)
    export.export(target, merged, dataclasses.replace(model, lora=None))
    files[processes] = (target / "model.safetensors").read_bytes()
    ran = run(settings, saved=copy)
    assert len(ran.rounds) == 1
    # The loss is a mean of advantages of about 1, which nearly cancel: what is
    # left of them is exact to the rounding of 1.
    for name, atol in {"loss": 2.0**-24, "grad_norm": 0.0}.items():
      pair = ran.rounds[0][name], whole.rounds[2][name]
      np.testing.assert_allclose(*pair, rtol=1e-5, atol=atol, err_msg=name)
    if processes == 2:
      for name, leaf in whole.params.items():
        np.testing.assert_array_equal(leaf, ran.params[name], err_msg=name)
  assert files[1] == files[2] == files[4]


def weights(settings, saved):
  """Returns the newest weights, as launch.export reads them."""

  async def read():
    parts = assemble.build(settings)
    checkpoints = checkpoint.Checkpoints(saved, keep=9)
    try:
      found = await initial_state.restore(parts, checkpoints)
      assert found is not None
      return found.state.params
    finally:
      checkpoints.close()
      await parts.close()

  return asyncio.run(read())
