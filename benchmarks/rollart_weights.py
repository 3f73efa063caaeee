"""RollArt's weight transfer: seconds of each way, and the gain of hiding it.

  python -m benchmarks.rollart_weights [--rounds=7]

  TCP            learner to engines, while decoding stands still
  push           learner to the store, while decoding goes on
  pull           store to the hosts of the engines, all of it
  exposed pull   the part of it for which decoding stands still
  push and pull  one after the other, each as a whole

RollArt (arXiv 2512.22560, tables 3 and 4) publishes the seconds and bytes of
three models. Fitted, and so no results: the rate of each way, from the 8B model
alone, with the exposed share of its pull. Held out: the other two. The declared
model is a rate, and so it cannot tell two models of a different layout apart.
`hidden` is what the simulator charges (`resources.WeightPath`): buckets of 1 GB
that are pulled when they were pushed.

Hiding the store's way behind rollout and training is said to gain 1.10 to 1.16x
of a step over an exposed transfer by NCCL (7.4), of steps that are not
published. Three columns:

  declared   (T + exposed) / (T + exposed pull) of a step T that hides the whole
             push, by the published seconds alone: the T of 1.16x and of 1.10x,
             and the gain at T = push. A shorter T waits for the push, and a
             longer one gains less.
  decoding   the same ratio of steps of the real coordinator, in the order of
             submission, on engines that are always full: decoding is the
             shortest that leaves time for training, 84 / 281 of it as in 3.1,
             and for the transfer. Lengths are assumed, as in `rollout_pipe`
  waiting    the same on H800 and the Gaussian latencies of `rollart_ladder`, as
             groups complete, where steps are longer and engines wait

A bound of eta is on the learner's version less that of the first token. RollArt
trains a batch after it has served the version of the step before. Read as a
bound on the version that is served when the batch is taken, less that of the
first request, its alpha of 1 is an eta of 2. With eta = 1 a round is admitted
when the version before the last is served, so two rounds take at least a
rollout, a training and a transfer, hidden or not. Where they take longer, the
engines are full and hiding gains; where rollout is a wait, only what is shorter
is faster. An exposed transfer stops decoding here, and the learner trains on;
there it precedes the training step.

Writes benchmarks/results/rollart_weights.json.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

from absl import app

from benchmarks import machine, rollart_ladder, simulated
from rl.rollout import group_rollout
from rl.schedule import overlap
from rl.simulation import distributions, resources, simulate, workload
from rl.simulation import processor as simulated_processor
from rl.simulation import result as simulation_result

SIZE_BYTES = {"8B": 15.26e9, "14B": 27.51e9, "32B": 61.02e9}
PUBLISHED_S = {
  "TCP": {"8B": 6.9, "14B": 14.4, "32B": 29.6},
  "push": {"8B": 32.4, "14B": 67.8, "32B": 127.3},
  "pull": {"8B": 6.2, "14B": 16.3, "32B": 29.7},
  "exposed pull": {"8B": 1.4, "14B": 5.1, "32B": 9.6},
  "push and pull": {"8B": 38.6, "14B": 84.1, "32B": 157.0},
}
GAIN = (1.10, 1.16)
EXPOSED = ("TCP", "push and pull")
_FITTED = "8B"
_BUCKET_BYTES = 1e9
_GROUPS, _MEMBERS, _SLOTS, _B0 = 32, 8, 64, 96.0
_PROMPT, _ANSWER = 100, 2_000


def link(way: str) -> resources.Link:
  """Returns the link of a way, as fast as it was for the 8B model."""
  rate = SIZE_BYTES[_FITTED] / PUBLISHED_S[way][_FITTED]
  return resources.Link(bytes_per_s=rate)


def seconds(
  model: str, *ways: str, bucket_bytes: float | None = _BUCKET_BYTES
) -> float:
  """Returns the seconds of a model over one way, or over several in turn.

  Args:
    bucket_bytes: None: the whole model is one bucket.
  """
  return resources.WeightPath(
    size_bytes=SIZE_BYTES[model],
    links=tuple(map(link, ways)),
    bucket_bytes=bucket_bytes or SIZE_BYTES[model],
  ).seconds


def predicted(model: str) -> Mapping[str, float]:
  """Returns the seconds of each published way."""
  each = {way: seconds(model, way) for way in list(PUBLISHED_S)[:4]}
  whole = seconds(model, "push", "pull", bucket_bytes=None)
  return {**each, "push and pull": whole}


def rows() -> list[dict[str, Any]]:
  """Returns a row for each model and way."""
  return [
    {
      "way": way,
      "model": model,
      "fitted": model == _FITTED,
      "published_s": PUBLISHED_S[way][model],
      "predicted_s": value,
      "error": simulated.deviation(value, PUBLISHED_S[way][model]),
    }
    for model in SIZE_BYTES
    for way, value in predicted(model).items()
  ]


def declared() -> list[dict[str, Any]]:
  """Returns the steps of the published gain, by model and exposed way."""
  found = []
  for model, way in itertools.product(SIZE_BYTES, EXPOSED):
    exposed_s, push_s, pull_s = (
      PUBLISHED_S[each][model] for each in (way, "push", "exposed pull")
    )
    least_s, most_s = (
      (exposed_s - gain * pull_s) / (gain - 1.0) for gain in reversed(GAIN)
    )
    found.append(
      {
        "model": model,
        "exposed": way,
        "least_s": least_s,
        "most_s": most_s,
        "push_s": push_s,
        "gain": (push_s + exposed_s) / (push_s + pull_s),
      }
    )
  return found


def waiting(
  model: str, eta: int, stop_s: float, push_s: float, rounds: int
) -> simulation_result.Result:
  """Returns the result of a ladder's run, with latencies of 10 s a turn."""
  played = dataclasses.replace(
    rollart_ladder.MODELS[model],
    latency="gaussian",
    pull_s=stop_s,
    push_s=push_s,
  )
  schedule = overlap.in_flight(rollart_ladder.GROUPS, eta, on_publish="keep_kv")
  schedule = dataclasses.replace(schedule, consume="drop")
  rung = rollart_ladder.Rung(schedule=schedule, hidden=True)
  return rollart_ladder.play(rung, played, _token_s(model, rounds), rounds)


@functools.cache
def _token_s(model: str, rounds: int) -> float:
  played = dataclasses.replace(rollart_ladder.MODELS[model], latency="gaussian")
  return rollart_ladder.fit(played, rounds)


def decoding(
  model: str, eta: int, stop_s: float, push_s: float, rounds: int
) -> simulation_result.Result:
  """Returns the result of a run whose engine is always full."""
  hidden_s = PUBLISHED_S["push"][model] + PUBLISHED_S["exposed pull"][model]
  decode_s = hidden_s / (1.0 - rollart_ladder.TRAIN_SHARE)
  members = _GROUPS * _MEMBERS
  unit = simulated_processor.Speed(tau0_s=1.0, b0=_B0, slots=_SLOTS)
  speed = simulated_processor.Speed(
    tau0_s=decode_s * unit.tokens_per_s / (members * _ANSWER),
    b0=_B0,
    slots=_SLOTS,
    prefill_per_s=math.inf,
    update_s=stop_s,
  )
  token_s = (
    rollart_ladder.TRAIN_SHARE * decode_s / (members * (_ANSWER + _PROMPT))
  )
  answers = distributions.LogNormal(mean=float(_ANSWER), sigma=0.4)
  record = simulated.play(
    simulate.Simulation(
      cluster=simulated.cluster(speed, token_s=token_s, transfer_s=push_s),
      workloads=(
        workload.Workload(
          prompt_tokens=distributions.Fixed(float(_PROMPT)),
          answer_tokens=answers,
        ),
      ),
      overlap=overlap.in_flight(_GROUPS, eta, on_publish="keep_kv"),
      rollout=group_rollout.Rollout(
        group_size=_MEMBERS,
        max_turns=1,
        turn_tokens=32_768,
        max_tokens=65_536,
      ),
      rounds=rounds + 1 + 2 * eta,
    )
  )
  return simulation_result.measure(record)


def steps(
  play: Callable[..., simulation_result.Result], model: str, rounds: int
) -> list[dict[str, Any]]:
  """Returns the simulated gains of a model, by bound and exposed way.

  Args:
    play: `decoding` or `waiting`.
  """
  found = []
  for eta in (1, 2):
    ways = "exposed pull", "push"
    hidden = play(
      model, eta, *(PUBLISHED_S[way][model] for way in ways), rounds
    )
    for way in EXPOSED:
      exposed = play(model, eta, PUBLISHED_S[way][model], 0.0, rounds)
      gain = exposed.step_s / hidden.step_s
      found.append(
        {
          "played": play.__name__,
          "model": model,
          "eta": eta,
          "exposed": way,
          "exposed_step_s": exposed.step_s,
          "hidden_step_s": hidden.step_s,
          "train_s": hidden.train_s,
          "gain": gain,
          "of tokens": hidden.tokens_per_s / exposed.tokens_per_s,
          "place": simulated.place(gain, *GAIN),
        }
      )
  return found


def main(_: list[str]) -> None:
  """Predicts, prints and keeps."""
  table = rows()
  machine.show("seconds of new weights", table)
  hidden = {model: seconds(model, "push", "pull") for model in SIZE_BYTES}
  print(f"\nhidden, by buckets: {hidden}")
  known = declared()
  machine.show(f"steps that gain {GAIN}", known)
  rounds = simulated.ROUNDS.value
  gains = [
    row
    for play, model in itertools.product((decoding, waiting), SIZE_BYTES)
    for row in steps(play, model, rounds)
  ]
  machine.show("exposed over hidden, simulated", gains)
  machine.keep(
    "rollart_weights",
    bucket_bytes=_BUCKET_BYTES,
    fitted=_FITTED,
    rows=table,
    hidden_s=hidden,
    published_gain=GAIN,
    declared=known,
    rounds=rounds,
    gains=gains,
  )


if __name__ == "__main__":
  app.run(main)
