"""Trackers: services that show the metrics of runs, many of them side by side.

round -> MetricsWriter -> Background.write -> queue -> thread -> Tracker.write

A tracker that fails ends the tracking, with a warning, and never the run:
metrics.jsonl has everything.
"""

import contextlib
import dataclasses
import os
import pathlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from rl.settings import checks, overrides

_CLOSE_S = 60.0
_MAX_WAITING = 10_000
TRACKER_ID = "tracker_id"
"""File in the directory of a run: its name at the service."""
DIRECTORY = "wandb"
"""Written there by Weights & Biases."""


class Tracker(Protocol):
  """The run at a service. One thread at a time calls it."""

  def write(self, values: Mapping[str, float], step: int) -> None:
    """Takes metrics of a round, all finite."""

  def close(self) -> None:
    """Sends what is left."""


@runtime_checkable
class TrackerSpec(Protocol):
  """Settings of a tracker: a frozen dataclass, of your own or of those below.

  A `validate_installed`, where there is one, refuses a run before it starts.
  """

  def open(self, run_dir: pathlib.Path, settings: Mapping[str, Any]) -> Tracker:
    """Opens the run, or the one that an earlier process has opened.

    Args:
      settings: of the run, to be shown beside its curves.

    Raises:
      TrackerFailed: the service cannot be used, and why.
    """
    ...


class TrackerFailed(Exception):
  """A service that cannot be used, with its reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsAndBiases:
  """Runs at Weights & Biases, or its files for `wandb sync`.

  Attributes:
    project: that the run belongs to.
    mode: "offline" keeps files in the directory of the run and needs neither
      a network nor an account.
  """

  short_name: ClassVar[str] = "wandb"

  project: str = "twinmesh"
  mode: Literal["online", "offline"] = "online"

  def validate(self) -> None:
    """Raises ValueError on a mode that does not exist."""
    checks.one_of(self, ("online", "offline"), "mode")

  def validate_installed(self) -> None:
    """Raises ValueError where the package is missing."""
    checks.installed("tracker=wandb", "wandb", "wandb")

  def open(self, run_dir: pathlib.Path, settings: Mapping[str, Any]) -> Tracker:
    """Opens the run; see `TrackerSpec.open`."""
    return _Wandb(self, run_dir, settings)


class _Wandb:
  def __init__(
    self,
    chosen: WeightsAndBiases,
    run_dir: pathlib.Path,
    settings: Mapping[str, Any],
  ):
    import wandb  # pyright: ignore[reportMissingImports]

    known = _known_id(run_dir)
    try:
      self._run = wandb.init(
        project=chosen.project,
        mode=chosen.mode,
        id=known,
        resume="allow",
        name=run_dir.name,
        dir=run_dir,
        config=dict(settings),
        settings=wandb.Settings(
          console="off", silent=True, finish_timeout=_CLOSE_S
        ),
      )
    except (wandb.Error, OSError) as error:
      raise TrackerFailed(
        f"Weights & Biases cannot be used: {error}; run `wandb login`, or use "
        "--config.tracker.mode=offline"
      ) from error
    # Steps of theirs may only grow, and a resumed run repeats rounds.
    self._run.define_metric("*", step_metric="round")
    if known is None:
      _keep_id(run_dir, self._run.id)

  def write(self, values: Mapping[str, float], step: int) -> None:
    self._run.log({**values, "round": step})

  def close(self) -> None:
    self._run.finish()


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLflow:
  """Runs at an MLflow server, or in a database.

  Attributes:
    experiment: that the run belongs to, made where it does not exist.
    uri: of the server or the store, such as http://HOST:5000. None takes that
      of the variable MLFLOW_TRACKING_URI.
  """

  short_name: ClassVar[str] = "mlflow"

  experiment: str = "twinmesh"
  uri: str | None = None

  def validate_installed(self) -> None:
    """Raises ValueError where the package is missing."""
    checks.installed("tracker=mlflow", "mlflow", "mlflow")

  def open(self, run_dir: pathlib.Path, settings: Mapping[str, Any]) -> Tracker:
    """Opens the run; see `TrackerSpec.open`."""
    return _Mlflow(self, run_dir, settings)


class _Mlflow:
  def __init__(
    self, chosen: MLflow, run_dir: pathlib.Path, settings: Mapping[str, Any]
  ):
    import mlflow  # pyright: ignore[reportMissingImports]
    from mlflow import (  # pyright: ignore[reportMissingImports]
      entities,
      exceptions,
    )

    # It would try for minutes to reach a server that is not there.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    self._metric = entities.Metric
    known = _known_id(run_dir)
    try:
      self._client = mlflow.MlflowClient(chosen.uri)
      self._id = known or self._begin(chosen.experiment, run_dir, settings)
      self._client.set_terminated(self._id, "RUNNING")
    except (exceptions.MlflowException, OSError) as error:
      raise TrackerFailed(
        f"MLflow cannot be used: {error}; set --config.tracker.uri"
      ) from error
    if known is None:
      _keep_id(run_dir, self._id)

  def _begin(
    self, name: str, run_dir: pathlib.Path, settings: Mapping[str, Any]
  ) -> str:
    found = self._client.get_experiment_by_name(name)
    experiment = (
      found.experiment_id if found else self._client.create_experiment(name)
    )
    run = self._client.create_run(experiment, run_name=run_dir.name)
    for key, value in overrides.flat(settings).items():
      self._client.log_param(run.info.run_id, key, value)
    return run.info.run_id

  def write(self, values: Mapping[str, float], step: int) -> None:
    now_ms = int(time.time() * 1000)
    self._client.log_batch(
      self._id,
      metrics=[
        self._metric(name, value, now_ms, step)
        for name, value in values.items()
      ],
    )

  def close(self) -> None:
    self._client.set_terminated(self._id, "FINISHED")


def _known_id(run_dir: pathlib.Path) -> str | None:
  file = run_dir / TRACKER_ID
  text = file.read_text("utf-8", "replace").strip() if file.is_file() else ""
  # Of a damaged file nothing is sent anywhere.
  return text if text.isascii() and text.isalnum() else None


def _keep_id(run_dir: pathlib.Path, text: str) -> None:
  (run_dir / TRACKER_ID).write_text(f"{text}\n", "utf-8")


class Background:
  """A tracker that is called in a thread of its own, and may fail.

  `write` and `close` belong to one thread, which never waits for the service,
  except in `close` for up to `close_s`.
  """

  def __init__(
    self,
    tracker: Tracker,
    warn: Callable[[str], None],
    close_s: float = _CLOSE_S,
  ):
    """Starts the thread.

    Args:
      warn: takes the sentence that the tracking has ended, once.
      close_s: that the service has for what is left.
    """
    self._tracker, self._warn, self._close_s = tracker, warn, close_s
    self._waiting: queue.Queue[tuple[Mapping[str, float], int] | None]
    self._waiting = queue.Queue(_MAX_WAITING)
    self._failure = ""
    self._has_warned = False
    # A daemon: a service that hangs does not keep the process.
    self._thread = threading.Thread(
      target=self._run, name="tracker", daemon=True
    )
    self._thread.start()

  def write(self, values: Mapping[str, float], step: int) -> None:
    """Queues metrics of a round."""
    try:
      self._waiting.put_nowait((values, step))
    except queue.Full:
      self._failure = f"{_MAX_WAITING} rounds wait for it"
    self._warn_once()

  def close(self) -> None:
    """Waits until all is sent, or for `close_s`."""
    if not self._failure:
      until_s = time.monotonic() + self._close_s
      with contextlib.suppress(queue.Full):  # Told below.
        self._waiting.put(None, timeout=self._close_s)
      self._thread.join(max(until_s - time.monotonic(), 0.0))
      if self._thread.is_alive():
        self._failure = f"it did not take all within {self._close_s:g} s"
    self._warn_once()

  def _warn_once(self) -> None:
    if self._failure and not self._has_warned:
      self._has_warned = True
      self._warn(
        f"the tracker gets no more metrics: {self._failure}; metrics.jsonl has "
        "all of them"
      )

  def _run(self) -> None:
    try:
      while (item := self._waiting.get()) is not None:
        self._tracker.write(*item)
      self._tracker.close()
    # A client of a service may raise anything.
    except Exception as error:
      self._failure = f"{type(error).__name__}: {error}"
