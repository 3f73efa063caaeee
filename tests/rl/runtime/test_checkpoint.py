import asyncio
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from jax.sharding import NamedSharding, PartitionSpec

from rl.runtime import checkpoint

# When one read or write of orbax fails, it drops the others mid-way, and their
# exceptions surface wherever the garbage collector happens to run.
pytestmark = [
  pytest.mark.compiled,
  pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

_ROOT = pathlib.Path(__file__).parents[3]


class State(NamedTuple):
  params: dict[str, jax.Array]
  opt: tuple[jax.Array, ...]
  step: jax.Array


def _mesh(*shape: int) -> jax.sharding.Mesh:
  devices = np.asarray(jax.devices()[:8]).reshape(shape)
  return jax.sharding.Mesh(devices, ("data", "model"))


def _state(step: int) -> State:
  key = jax.random.key(step)
  return State(
    params={
      "embed": jax.random.normal(key, (64, 128)),
      "scale": jax.random.normal(key, (16,), jnp.bfloat16),
    },
    opt=(jnp.full((), step, jnp.int32), jnp.asarray([True, False])),
    step=jnp.full((), step, jnp.uint32),
  )


def _abstract(state, sharding=None):
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=sharding or x.sharding
    ),
    state,
  )


def _assert_same_bits(actual, expected):
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for x, y in zip(
    jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
  ):
    assert x.dtype == y.dtype
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.fixture
def directory(tmp_path):
  return tmp_path / "checkpoints"


@pytest.fixture
def checkpoints(directory):
  opened = checkpoint.Checkpoints(directory, keep=2)
  yield opened
  opened.close()


@pytest.fixture
def two_saved(checkpoints):
  for step in (1, 2):
    checkpoints.save(step, _state(step), {"cursor": step})
  checkpoints.wait()
  return checkpoints


def _largest_file(path: pathlib.Path) -> pathlib.Path:
  files = [p for p in path.rglob("*") if p.is_file()]
  return max(files, key=lambda p: p.stat().st_size)


def _flip_one_bit(path: pathlib.Path):
  file = _largest_file(path)
  data = bytearray(file.read_bytes())
  data[len(data) // 2] ^= 1
  file.write_bytes(data)


def _change_the_host_data(path: pathlib.Path):
  file = path / "record" / "metadata"
  file.write_text(file.read_text().replace('"cursor": 2', '"cursor": 3'))


def _cut_short(path: pathlib.Path):
  file = _largest_file(path)
  os.truncate(file, file.stat().st_size // 2)


def _delete_the_data(path: pathlib.Path):
  _largest_file(path).unlink()


def _delete_the_record(path: pathlib.Path):
  shutil.rmtree(path / "record")


def _empty(path: pathlib.Path):
  shutil.rmtree(path)
  path.mkdir()


def test_a_directory_without_checkpoints_restores_nothing(checkpoints):
  assert checkpoints.restore(_abstract(_state(0))) is None


def test_the_newest_comes_back_bit_for_bit_with_its_host_data(two_saved):
  restored = two_saved.restore(_abstract(_state(0)))
  assert restored.step == 2
  assert restored.host == {"cursor": 2}
  assert restored.skipped == ()
  _assert_same_bits(restored.state, _state(2))


def test_eight_shards_come_back_on_another_mesh(checkpoints):
  rows = NamedSharding(_mesh(8, 1), PartitionSpec("data"))
  both = NamedSharding(_mesh(2, 4), PartitionSpec("model", "data"))
  array = jax.random.normal(jax.random.key(0), (64, 128))
  checkpoints.save(1, {"w": jax.device_put(array, rows)}, {})
  checkpoints.wait()
  restored = checkpoints.restore(_abstract({"w": array}, both))
  assert restored.state["w"].sharding == both
  _assert_same_bits(restored.state, {"w": array})


def test_a_part_of_the_state_is_read_alone(two_saved):
  abstract = {"params": _abstract(_state(0).params)}
  restored = two_saved.restore(abstract)
  _assert_same_bits(restored.state, {"params": _state(2).params})


def test_arrays_and_host_data_may_change_once_save_returns(checkpoints):
  host = {"cursor": [1]}
  state = {"w": jnp.ones((256, 256))}
  checkpoints.save(1, state, host)
  host["cursor"].append(2)
  overwrite = jax.jit(lambda tree: {"w": tree["w"] * 0}, donate_argnums=0)
  jax.block_until_ready(overwrite(state))
  checkpoints.wait()
  restored = checkpoints.restore(
    {
      "w": jax.ShapeDtypeStruct(
        (256, 256), jnp.float32, sharding=jnp.ones(1).sharding
      )
    }
  )
  assert restored.host == {"cursor": [1]}
  assert np.all(np.asarray(restored.state["w"]) == 1)


def test_only_the_newest_are_kept(two_saved, directory):
  two_saved.save(3, _state(3), {})
  two_saved.wait()
  assert sorted(p.name for p in directory.iterdir()) == ["2", "3"]


async def test_saving_and_restoring_work_inside_an_event_loop(checkpoints):
  checkpoints.save(1, _state(1), {})
  checkpoints.wait()
  assert checkpoints.restore(_abstract(_state(0))).step == 1


@pytest.mark.parametrize(
  "damage",
  [
    _flip_one_bit,
    _change_the_host_data,
    _cut_short,
    _delete_the_data,
    _delete_the_record,
    _empty,
  ],
)
def test_a_damaged_checkpoint_is_skipped_and_named(
  damage, two_saved, directory, caplog
):
  damage(directory / "2")
  restored = two_saved.restore(_abstract(_state(0)))
  assert restored.step == 1
  assert restored.host == {"cursor": 1}
  _assert_same_bits(restored.state, _state(1))
  assert [name.split()[0] for name in restored.skipped] == ["2"]
  assert f"damaged checkpoint {directory}/2" in caplog.text
  assert "using 1" in caplog.text


@pytest.mark.parametrize("name", ["\uff13", "003", "\u0663", "x"])
def test_a_step_has_a_plain_number(two_saved, directory, name):
  (directory / name).mkdir()
  assert two_saved.restore(_abstract(_state(0))).step == 2
  two_saved.save(4, _state(4), {})
  two_saved.wait()
  assert (directory / name).is_dir()


def test_what_is_no_directory_is_moved_aside_or_deleted_in_its_turn(
  two_saved, directory
):
  (directory / "0").write_text("")
  (directory / "8").symlink_to("8")
  (directory / "9").write_text("")
  (directory / "9.damaged").write_text("")
  assert two_saved.restore(_abstract(_state(0))).step == 2
  two_saved.save(10, _state(4), {})
  two_saved.wait()
  names = sorted(path.name for path in directory.iterdir())
  assert names == ["10", "2", "8.damaged", "9.damaged"]


def test_when_every_checkpoint_is_damaged_nothing_is_restored(
  two_saved, directory, caplog
):
  _empty(directory / "1")
  _empty(directory / "2")
  assert two_saved.restore(_abstract(_state(0))) is None
  assert "none is left" in caplog.text


def test_the_step_of_a_damaged_checkpoint_can_be_saved_again(
  two_saved, directory
):
  _cut_short(directory / "2")
  two_saved.restore(_abstract(_state(0)))
  assert sorted(p.name for p in directory.iterdir()) == ["1", "2"]
  two_saved.save(2, _state(2), {})
  two_saved.wait()
  names = sorted(p.name for p in directory.iterdir())
  assert names == ["1", "2", "2.damaged"]
  assert two_saved.restore(_abstract(_state(0))).step == 2


@pytest.mark.parametrize(
  ("wanted", "message"),
  [
    ((8,), r"leaf params/b is float32\[4\].* has float32\[8\]"),
    (None, r"leaf params/b is float32\[4\].* has no such leaf"),
  ],
)
def test_another_model_is_an_error_that_names_the_leaf(
  wanted, message, checkpoints
):
  state = {"params": {"a": jnp.ones(2), "b": jnp.ones(4)}}
  checkpoints.save(1, state, {})
  checkpoints.wait()
  other = {"params": {"a": jnp.ones(2)}}
  if wanted:
    other["params"]["b"] = jnp.ones(wanted)
  with pytest.raises(checkpoint.Mismatch, match=message):
    checkpoints.restore(_abstract(other))


def test_a_model_with_other_names_may_be_of_an_older_version(checkpoints):
  checkpoints.save(1, {"params": {"router": jnp.ones(2)}}, {})
  checkpoints.wait()
  new = {"params": {"router": {"kernel": jnp.ones(2)}}}
  with pytest.raises(checkpoint.Mismatch) as error:
    checkpoints.restore(_abstract(new))
  assert "leaf params/router/kernel is absent" in str(error.value)
  assert "an older version saved it, parameters had other" in str(error.value)


def test_a_leaf_that_was_never_saved_is_an_error(two_saved):
  abstract = _abstract(_state(0)._asdict() | {"ema": jnp.ones(3)})
  with pytest.raises(checkpoint.Mismatch, match="leaf ema is absent"):
    two_saved.restore(abstract)


def test_a_failure_in_the_background_is_raised_by_wait(checkpoints):
  # Files of more than 1000 bytes cannot be written: EFBIG, as a full disk.
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
  try:
    checkpoints.save(1, _state(1), {})
    asyncio.run(checkpoints.written())  # Says nothing of how it went.
    with pytest.raises(ValueError, match="File too large"):
      checkpoints.wait()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert checkpoints.restore(_abstract(_state(0))) is None
  checkpoints.save(2, _state(2), {})
  checkpoints.wait()
  assert checkpoints.restore(_abstract(_state(0))).step == 2


def test_a_write_that_ends_after_its_save_has_failed_prints_nothing(
  directory, monkeypatch
):
  printed = []
  monkeypatch.setattr(sys, "unraisablehook", printed.append)
  checkpoint.Checkpoints(directory, keep=1).close()
  promise, write = tensorstore.Promise.new()

  async def save():
    await asyncio.gather(_awaited(write), _failed())

  # As orbax does: the loop is closed while a write goes on.
  loop = asyncio.new_event_loop()
  with pytest.raises(OSError, match="No space left"):
    loop.run_until_complete(save())
  loop.close()
  promise.set_result(None)
  assert write.done()
  assert not printed
  # Errors of others are printed as ever.
  finalized = _Broken()
  del finalized
  assert [str(one.exc_value) for one in printed] == ["of a finalizer"]


class _Broken:
  def __del__(self):
    raise RuntimeError("of a finalizer")


async def _awaited(write):
  await write


async def _failed():
  await asyncio.sleep(0)
  raise OSError("No space left on device")


def test_a_system_that_is_short_of_something_damages_no_checkpoint(
  two_saved, monkeypatch
):
  def fail(*_):
    # As tensorstore tells it.
    raise ValueError("RESOURCE_EXHAUSTED: Too many open files [source ..]")

  with monkeypatch.context() as patch:
    patch.setattr(two_saved, "_read", fail)
    with pytest.raises(OSError, match="Too many open files, as it was read"):
      two_saved.restore(_abstract(_state(0)))
  newest = two_saved.restore(_abstract(_state(0)))
  assert (newest.step, newest.skipped) == (2, ())


def test_one_that_its_run_deletes_as_it_is_read_is_not_damaged(
  two_saved, directory, monkeypatch, caplog
):
  read = two_saved._read

  def replace(path, abstract):
    if path.name == "2":
      path.rename(directory / "3")
    return read(path, abstract)

  monkeypatch.setattr(two_saved, "_read", replace)
  found = two_saved.restore(_abstract(_state(0)))
  assert (found.step, found.skipped, caplog.text) == (3, (), "")


def test_a_checkpoint_without_its_list_of_arrays_replaces_none(
  two_saved, directory
):
  for step in (3, 4):  # The error is raised once, and other saves go on.
    two_saved.save(step, _state(step), {})
    asyncio.run(two_saved.written())
    (directory / str(step) / "state" / "manifest.ocdbt").unlink()
    with pytest.raises(OSError, match="was not written"):
      two_saved.wait()
    two_saved.wait()
  names = sorted(path.name for path in directory.iterdir())
  assert names == ["1", "2", "3.damaged", "4.damaged"]
  # Nor does one that is not there yet, where a user ended the wait for it.
  two_saved.save(5, _state(5), {})
  asyncio.run(two_saved.written())
  shutil.rmtree(directory / "5")
  with pytest.raises(OSError, match="was not written"):
    two_saved.wait()


@pytest.mark.parametrize("name", ["lr[3]", "a]", "a\\b"])
def test_where_no_checkpoint_could_be_read_none_is_saved(tmp_path, name):
  opened = checkpoint.Checkpoints(tmp_path / name / "checkpoints", keep=1)
  with pytest.raises(ValueError, match="choose one without"):
    opened.save(1, _state(1), {})
  opened.close()
  assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_may_be_moved_where_none_could_be_saved(
  two_saved, directory, tmp_path
):
  directory.rename(tmp_path / "lr[3]")
  opened = checkpoint.Checkpoints(tmp_path / "lr[3]", keep=1)
  restored = opened.restore(_abstract(_state(0)))
  opened.close()
  assert restored is not None
  assert restored.step == 2


def test_a_step_that_exists_is_not_overwritten(two_saved):
  with pytest.raises(ValueError, match="already exists"):
    two_saved.save(2, _state(3), {})


_SAVE_FOREVER = """
import itertools, sys
import jax.numpy as jnp
from rl.runtime import checkpoint
checkpoints = checkpoint.Checkpoints(sys.argv[1], keep=1)
for step in itertools.count(1):
  checkpoints.save(step, {"w": jnp.full((512, 512), step)}, {"cursor": step})
  print(step, flush=True)
"""


@pytest.mark.process
def test_a_killed_run_leaves_its_last_checkpoint_whole(checkpoints, directory):
  child = subprocess.Popen(
    [sys.executable, "-c", _SAVE_FOREVER, directory],
    cwd=_ROOT,
    stdout=subprocess.PIPE,
  )
  assert child.stdout
  for _ in range(5):
    child.stdout.readline()
  child.send_signal(signal.SIGKILL)
  child.communicate()
  # Whether or not the kill left one: an unfinished save of another step.
  (directory / "9.orbax-checkpoint-tmp").mkdir()
  state = {"w": jnp.zeros((512, 512), jnp.int32)}
  restored = checkpoints.restore(_abstract(state))
  # Save 5 returned, so save 4 is whole; 5 may be, or even later ones.
  assert restored.step >= 4
  assert restored.host == {"cursor": restored.step}
  assert np.all(np.asarray(restored.state["w"]) == restored.step)
  assert restored.skipped == ()
  checkpoints.save(restored.step + 1, state, {})
  checkpoints.wait()
  assert all(path.name.isdecimal() for path in directory.iterdir())


def test_a_failed_save_names_its_reason_and_what_is_whole(two_saved):
  with (
    pytest.raises(checkpoint.Unsaved) as raised,
    two_saved.saving("the checkpoint of round 3"),
  ):
    raise ValueError("pages of orbax\nNo space left on device\nand more")
  assert str(raised.value).startswith(
    "the checkpoint of round 3 could not be saved: No space left on device; "
  )
  assert str(raised.value).endswith(" MB are free there; 2 is whole")
