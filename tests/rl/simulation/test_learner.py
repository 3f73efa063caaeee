"""The simulated trainer and publisher: their seconds."""

import asyncio

import numpy as np
import pytest

from rl.audit import event_log
from rl.data import trajectory
from rl.pools import router, weight_publisher
from rl.runtime import trace
from rl.simulation import engine as simulated_engine
from rl.simulation import learner as simulated_learner
from rl.simulation import processor as simulated_processor
from rl.train import trainer as trainer_lib

pytestmark = pytest.mark.virtual_time


def member(index, tokens, status=trajectory.Status.COMPLETED):
  """Returns a trajectory of 10 ids of context and so many tokens."""
  turn = trajectory.Turn(
    context=np.zeros(10, np.int32),
    tokens=np.zeros(tokens, np.int32),
    logprobs=np.zeros(tokens, np.float32),
    versions=np.zeros(tokens, np.int32),
    stop="stop",
  )
  return trajectory.Trajectory(
    task_id="math/train/0",
    group_id=0,
    index=index,
    turns=[turn],
    status=status,
  )


def spans_of_now():
  return trace.Trace(None, clock=asyncio.get_running_loop().time)


async def test_it_takes_the_seconds_of_all_ids_without_a_fault():
  spans = spans_of_now()
  learner = simulated_learner.LearnerSpeed(token_s=0.1, update_s=5.0)
  trainer = simulated_learner.SimulatedTrainer(learner, spans)
  group = trajectory.Group(
    group_id=0,
    trajectories=[
      member(0, 20),
      member(1, 1000, trajectory.Status.ENV_FAULT),
    ],
    admitted=0,
  )
  (used,) = await trainer.accumulate([group])
  accumulated_s = asyncio.get_running_loop().time()
  await trainer.update()
  assert used.trained.tolist() == [True, False]
  assert accumulated_s == pytest.approx(30 * 0.1)
  assert [(s.name, s.end - s.start) for s in spans.spans] == [
    ("accumulate", pytest.approx(3.0)),
    ("update", pytest.approx(5.0)),
  ]
  assert trainer.params == trainer.state == 1
  assert isinstance(trainer, trainer_lib.Trainer)


async def test_ids_that_fill_no_batch_train_with_the_update():
  spans = spans_of_now()
  learner = simulated_learner.LearnerSpeed(
    token_s=0.1, batch_ids=25.0, update_s=5.0
  )
  trainer = simulated_learner.SimulatedTrainer(learner, spans)
  for tokens in (20, 30):
    group = trajectory.Group(
      group_id=0, trajectories=[member(0, tokens)], admitted=0
    )
    await trainer.accumulate([group])
  await trainer.update()
  # 30 ids are a batch of 25 and 5; with 40 more there is one again, and 20.
  assert [(s.name, round(s.end - s.start, 6)) for s in spans.spans] == [
    ("accumulate", 2.5),
    ("accumulate", 2.5),
    ("accumulate", 2.0),
    ("update", 5.0),
  ]


def test_batches_of_less_than_an_id_are_refused():
  learner = simulated_learner.LearnerSpeed(batch_ids=0.001)
  words = r"batch_ids=0\.001 must be at least 1; or 0, where whatever"
  with pytest.raises(ValueError, match=words):
    learner.validate()


async def test_weights_travel_and_then_every_engine_stands_still():
  loop = asyncio.get_running_loop()
  log, spans = event_log.EventLog(None, clock=loop.time), spans_of_now()
  engines = [
    simulated_engine.SimulatedEngine(
      simulated_processor.Speed(update_s=update_s), lambda request: 1
    )
    for update_s in (1.0, 4.0)
  ]
  publisher = weight_publisher.WeightPublisher(
    router.Router(engines),
    simulated_learner.SimulatedTransfer(10.0),
    log,
    spans,
  )
  stood_s = await publisher.publish(1, "w", "recompute")
  assert stood_s == pytest.approx(4.0)
  assert [(e["kind"], e.get("engine"), e["t"]) for e in log.events] == [
    ("publish_start", None, 0.0),
    ("staged", 0, 10.0),
    ("staged", 1, 10.0),
    ("decode_suspended", 0, 10.0),
    ("decode_suspended", 1, 10.0),
    ("switched", 0, 11.0),
    ("decode_resumed", 0, 11.0),
    ("switched", 1, 14.0),
    ("decode_resumed", 1, 14.0),
    ("published", None, 14.0),
  ]
  assert [engine.params for engine in engines] == ["w", "w"]


@pytest.mark.parametrize(
  ("field", "value"),
  [("token_s", -1.0), ("update_s", -0.5), ("accelerators", 0)],
)
def test_a_learner_faster_than_time_is_refused(field, value):
  learner = simulated_learner.LearnerSpeed(**{field: value})
  with pytest.raises(ValueError, match=rf"cluster\.learner\.{field}={value}"):
    learner.validate()
