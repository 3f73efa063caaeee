"""RollArt's weight transfer: seconds of each way, from the rates of one model.

  python -m benchmarks.rollart_weights

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

Writes benchmarks/results/rollart_weights.json.
"""

from collections.abc import Mapping
from typing import Any

from absl import app

from benchmarks import machine, simulated
from rl.simulation import resources

SIZE_BYTES = {"8B": 15.26e9, "14B": 27.51e9, "32B": 61.02e9}
PUBLISHED_S = {
  "TCP": {"8B": 6.9, "14B": 14.4, "32B": 29.6},
  "push": {"8B": 32.4, "14B": 67.8, "32B": 127.3},
  "pull": {"8B": 6.2, "14B": 16.3, "32B": 29.7},
  "exposed pull": {"8B": 1.4, "14B": 5.1, "32B": 9.6},
  "push and pull": {"8B": 38.6, "14B": 84.1, "32B": 157.0},
}
_FITTED = "8B"
_BUCKET_BYTES = 1e9


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


def main(argv: list[str]) -> None:
  """Predicts, prints and keeps."""
  del argv
  table = rows()
  simulated.show("seconds of new weights", table)
  hidden = {model: seconds(model, "push", "pull") for model in SIZE_BYTES}
  print(f"\nhidden, by buckets: {hidden}")
  machine.keep(
    "rollart_weights",
    bucket_bytes=_BUCKET_BYTES,
    fitted=_FITTED,
    rows=table,
    hidden_s=hidden,
  )


if __name__ == "__main__":
  app.run(main)
