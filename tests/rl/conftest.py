"""Fixtures over a tiny engine that really decodes."""

import dataclasses

import pytest

from models import config as config_lib
from rl.pools import placement
from rl.runtime import mesh_thread, trace
from tests.helpers import engines_under_test
from tests.helpers import tiny_engine as tiny


@pytest.fixture(scope="module")
def config():
  return tiny.CONFIG


@pytest.fixture(scope="module")
def params():
  return engines_under_test.weights(0, tiny.CONFIG)


@pytest.fixture(scope="module")
def dense_config():
  return tiny.DENSE


@pytest.fixture(scope="module")
def dense_params():
  return engines_under_test.weights(0, tiny.DENSE)


@pytest.fixture(scope="module")
def _served():
  with tiny.serve() as served:
    yield served


@pytest.fixture
def served(_served):
  """Shared by tests, which leave it open and idle and give new names to all."""
  yield _served
  _served.check()


@pytest.fixture(scope="module")
def _pressed():
  with tiny.serve(
    slots=6,
    pages=10,
    row_buckets=(6,),
    chunk_buckets=(4,),
    steps_per_dispatch=5,
  ) as served:
    yield served


@pytest.fixture
def pressed(_pressed):
  """As `served`, with pages for little more than one whole conversation."""
  yield _pressed
  _pressed.check()


@pytest.fixture(scope="module")
def _dense():
  with tiny.serve(
    config=tiny.DENSE,
    slots=16,
    pages=24,
    row_buckets=(16,),
    chunk_buckets=(4,),
    prefill_tokens=64,
    batching_delay_s=0.0,
  ) as served:
    yield served


@pytest.fixture
def dense(_dense):
  """As `served`, of a model without experts that costs next to nothing."""
  yield _dense
  _dense.check()


@pytest.fixture(params=[(2, 2, 1), (1, 1, 2)], ids=["rows", "heads"])
def meshed(request):
  """On a mesh of several devices, with record of the experts."""
  with tiny.serve(
    *request.param,
    row_buckets=(4,),
    chunk_buckets=(4,),
    record_experts=True,
  ) as served:
    yield served


@pytest.fixture
def exact():
  """In float32, with one shape of new context."""
  with tiny.serve(row_buckets=(4,), chunk_buckets=(4,)) as served:
    yield served


@pytest.fixture
def bfloat16():
  """As `exact`, in bfloat16."""
  compute = config_lib.Compute(dtype="bfloat16")
  config = dataclasses.replace(tiny.CONFIG, compute=compute)
  with tiny.serve(
    config=config, row_buckets=(4,), chunk_buckets=(4,)
  ) as served:
    yield served


@pytest.fixture(scope="module")
def _queueing():
  with tiny.serve(
    config=tiny.DENSE,
    row_buckets=(4,),
    chunk_buckets=(6,),
    batching_delay_s=0.0,
  ) as served:
    yield served


@pytest.fixture
def queueing(_queueing):
  """As `served`, and two dispatches queue up: all rows are seen to go on."""
  _queueing.engine._scheduler._survival = 1.0
  yield _queueing
  _queueing.check()


@pytest.fixture
def breakable():
  """For one test alone; a single row, so that all but one request wait."""
  with tiny.serve(
    config=tiny.DENSE, slots=1, row_buckets=(1,), chunk_buckets=(4,)
  ) as served:
    yield served


@pytest.fixture(scope="module")
def one_device():
  return placement.Placement(colocated=True).layouts()[1]


@pytest.fixture
def spans():
  return trace.Trace(None)


@pytest.fixture
def thread(spans):
  thread = mesh_thread.MeshThread("learner", spans)
  yield thread
  thread.close()
