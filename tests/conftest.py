"""Set-up of all tests: devices, levels, and what `--room` selects.

Three levels, by marker: a test without one is a unit test and runs no XLA
program; `compiled` ones may; `process` ones start processes as well. A unit
test that compiles a program, or starts a process, fails. `slow` tests may do
either and are left to `make test-slow`.

The environment is set before jax is imported, also for the processes that
tests start: eight CPU devices, also where there is a GPU, because shardings are
tested on these; a compilation cache that outlives the run, because most of a
test's time is XLA; and machine code without optimisation, because a program
runs only a few times here. XLA's own passes run as ever. Where
PYTHONDONTWRITEBYTECODE keeps bytecode out of the checkout, it is cached beside
the compiled programs, because dozens of processes import the project.
"""

import asyncio
import collections
import gc
import inspect
import multiprocessing.process
import os
import pathlib
import platform
import signal
import subprocess
import sys

import pytest

from tests.helpers import packages, shared_programs

_DEVICES = "--xla_force_host_platform_device_count"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
  os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8".strip()
  )
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

_caches = pathlib.Path(
  os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache", "twinmesh"
)
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_caches / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

# The programs of test runs are known to other tests, and not to the user.
os.environ["XDG_STATE_HOME"] = str(_caches / "state")

# What `make fuzz` has found, and not in the checkout.
os.environ.setdefault(
  "HYPOTHESIS_STORAGE_DIRECTORY", str(_caches / "hypothesis")
)

if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
  sys.dont_write_bytecode = False
  sys.pycache_prefix = os.environ.setdefault(
    "PYTHONPYCACHEPREFIX", str(_caches / "bytecode")
  )

_TESTS = pathlib.Path(__file__).parent
_COMPILED = "/jax/core/compile/backend_compile_duration"
_counts = {"compiled": 0, "process": 0, "frozen": 0}
_BEFORE = pytest.StashKey[dict[str, int]]()
_SELECTED = pytest.StashKey[tuple[pathlib.Path, set[pathlib.Path]]]()


def pytest_addoption(parser):
  """Adds `--room`."""
  parser.addoption(
    "--room",
    metavar="PACKAGE",
    help="run the tests of a package, such as rl/engine, and the unit tests of "
    "the packages that import it",
  )


def _interrupt(number, frame):
  signal.default_int_handler(number, frame)


def _count(level, function):
  def counted(*args, **kwargs):
    _counts[level] += 1
    return function(*args, **kwargs)

  return counted


def pytest_configure(config):
  """Counts the processes that tests start, and selects what `--room` says."""
  # `asyncio.run` replaces Python's own handler, and to put that back, `signal`
  # writes the result of the whole run into an error message that nobody sees.
  signal.signal(signal.SIGINT, _interrupt)
  # Asks `uname`, once a process: the first client of openai would be blamed.
  platform.processor()
  for cls in (subprocess.Popen, multiprocessing.process.BaseProcess):
    name = "__init__" if cls is subprocess.Popen else "start"
    setattr(cls, name, _count("process", getattr(cls, name)))
  if room := config.getoption("--room"):
    if not (packages.ROOT / room).exists():
      raise pytest.UsageError(f"--room={room}: no such package or file")
    config.stash[_SELECTED] = _select(room)


def _tests_of(package):
  """Returns the directory, or the file, of the tests of a package."""
  path = _TESTS.joinpath(*package.split("."))
  return path if path.is_dir() else path.with_name(f"test_{path.name}.py")


def _select(room):
  """Returns where the package's own tests are, and those of its importers."""
  name = room.rstrip("/").removesuffix(".py").replace("/", ".")
  others = [_tests_of(other) for other in packages.importers(name)]
  # Of a top package its own files count, and not the packages in it.
  files = [file for place in others for file in place.glob("test_*.py")]
  return _tests_of(name), {*others, *files}


def pytest_ignore_collect(collection_path, config):
  """Leaves out the files that `--room` does not select."""
  if _SELECTED not in config.stash or collection_path.is_dir():
    return None
  own, others = config.stash[_SELECTED]
  wanted = collection_path.is_relative_to(own) or collection_path in others
  return None if wanted else True


@pytest.hookimpl(wrapper=True)
def pytest_collection():
  """Takes all that is imported out of the searches for garbage."""
  gc.disable()
  try:
    return (yield)
  finally:
    gc.freeze()
    gc.freeze = _count("frozen", gc.freeze)
    # Tracing creates millions of short-lived objects, few of them in cycles;
    # searching for those took a tenth of the time.
    gc.set_threshold(100_000, 50, 1000)
    gc.enable()


def _skip_without_gpu(items):
  """Skips items, with the reason, unless jax has a GPU."""
  if items:
    import jax

    if jax.default_backend() != "gpu":
      reason = "needs a GPU, and JAX_PLATFORMS=cuda,cpu"
      for item in items:
        item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_modifyitems(config, items):
  """Puts long files first, skips what needs a GPU, selects as `--room` says."""
  _skip_without_gpu([x for x in items if x.get_closest_marker("gpu")])
  level = {"process": 2, "compiled": 1}
  highest = collections.Counter()
  for item in items:
    marked = {mark.name for mark in item.iter_markers()}
    own = max((level.get(name, 0) for name in marked), default=0)
    if "slow" in marked and "compiled" not in marked:
      # Whole runs, and processes that are waited for, are the longest of all.
      own = 3
    highest[item.path] = max(highest[item.path], own)
  # At the end short ones are left, and all workers end together.
  items.sort(key=lambda item: -highest[item.path])
  if _SELECTED not in config.stash:
    return
  own, _ = config.stash[_SELECTED]
  left_out = {
    item
    for item in items
    if not item.path.is_relative_to(own)
    and any(map(item.get_closest_marker, level))
  }
  items[:] = [item for item in items if item not in left_out]
  config.hook.pytest_deselected(items=list(left_out))


def _listen():
  """Counts compiled programs from now on, once jax is there."""
  if "jax" in sys.modules and "listens" not in _counts:
    import jax

    _counts["listens"] = 1
    jax.monitoring.register_event_duration_secs_listener(
      lambda event, *_, **__: _counts.update(
        compiled=_counts["compiled"] + (event == _COMPILED)
      )
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item):
  """Notes the counts from which the test starts."""
  _listen()
  item.stash[_BEFORE] = dict(_counts)
  return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
  """Fails a test that did what its level does not allow."""
  result = yield
  allowed = {
    "process": ("process", "slow"),
    "compiled": ("compiled", "process", "slow"),
  }
  for level, markers in allowed.items():
    is_marked = any(map(item.get_closest_marker, markers))
    if not is_marked and _counts[level] > item.stash[_BEFORE][level]:
      did = {"process": "starts a process", "compiled": "runs an XLA program"}
      pytest.fail(f"it {did[level]}; mark it {level}", pytrace=False)
  return result


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
  """Runs a test that is `async`, in virtual time where it is marked so.

  A fixture that lives on a loop of its own, as an engine does, runs it there.
  """
  if not inspect.iscoroutinefunction(pyfuncitem.obj):
    return None
  parameters = inspect.signature(pyfuncitem.obj).parameters
  fixtures = {x: pyfuncitem.funcargs[x] for x in parameters}
  test = pyfuncitem.obj(**fixtures)
  if served := [x for x in fixtures.values() if hasattr(x, "runner")]:
    served[0].run(test)
  elif pyfuncitem.get_closest_marker("virtual_time"):
    from rl.runtime import virtual_clock

    virtual_clock.run(test)
  else:
    asyncio.run(test)
  return True


@pytest.fixture(scope="module", autouse=True)
def _programs(request):
  """Shares the programs of a file, and releases them at its end.

  Each maps memory, and a process may have 65,530 such maps: XLA dies of more.
  """
  before = dict(_counts)
  with pytest.MonkeyPatch.context() as patch:
    if not request.node.get_closest_marker("own_programs"):
      shared_programs.share(patch)
    yield
  if _counts["compiled"] > before["compiled"]:
    import jax

    jax.clear_caches()
  if _counts["frozen"] > before["frozen"]:
    gc.unfreeze()  # What a run in this process froze is garbage by now.
  gc.collect()
  gc.freeze()  # The rest stays, and would be searched after every file.
