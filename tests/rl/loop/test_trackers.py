"""Trackers; those of the two services run where their packages are installed.

`make trackers` installs them.
"""

import dataclasses
import pathlib
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from configs import counter
from rl.loop import trackers
from rl.settings import checks
from tests.helpers import machine_speed

SETTINGS = {"seed": 3, "overlap": {"max_staleness": 1}}


class Kept:
  """A tracker that keeps what it is given, and may be held up."""

  def __init__(self):
    self.rows, self.is_closed = [], False
    self.may_go_on = threading.Event()
    self.may_go_on.set()

  def write(self, values, step):
    self.may_go_on.wait(machine_speed.scaled(60))
    if "bad" in values:
      raise ConnectionError("no route")
    self.rows.append((step, dict(values)))

  def close(self):
    self.is_closed = True


@dataclasses.dataclass(frozen=True)
class Own:
  """Settings of a tracker that the project does not know."""

  table: str = "runs"

  def open(self, run_dir, settings):
    return Kept()


def test_a_tracker_of_ones_own_is_a_setting():
  own = dataclasses.replace(counter.get_config(), tracker=Own())
  checks.validate(own)
  with pytest.raises(ValueError, match="tracker"):
    checks.validate(dataclasses.replace(own, tracker=Kept()))


def test_everything_is_sent_in_order_before_close_returns():
  kept, warnings = Kept(), []
  background = trackers.Background(kept, warnings.append)
  for step in range(3):
    background.write({"loss": step / 2}, step)
  background.close()
  assert kept.rows == [(0, {"loss": 0}), (1, {"loss": 0.5}), (2, {"loss": 1})]
  assert kept.is_closed
  assert not warnings


def test_a_service_that_fails_ends_the_tracking_with_one_warning():
  kept, warnings = Kept(), []
  background = trackers.Background(kept, warnings.append)
  background.write({"bad": 1.0}, 0)
  background.close()
  background.write({"loss": 1.0}, 1)
  background.close()
  assert kept.rows == []
  assert warnings == [
    "the tracker gets no more metrics: ConnectionError: no route; "
    "metrics.jsonl has all of them"
  ]


def test_a_service_that_hangs_holds_up_nobody():
  kept, warnings = Kept(), []
  kept.may_go_on.clear()
  background = trackers.Background(kept, warnings.append, close_s=0.01)
  background.write({"loss": 1.0}, 0)
  background.close()
  kept.may_go_on.set()
  assert "it did not take all within 0.01 s" in warnings[0]


def test_a_full_queue_holds_up_nobody_either(monkeypatch):
  monkeypatch.setattr(trackers, "_MAX_WAITING", 2)
  kept, warnings = Kept(), []
  kept.may_go_on.clear()
  background = trackers.Background(kept, warnings.append, close_s=0.2)
  background.write({"loss": 1.0}, 0)
  while not background._waiting.empty():  # Then it is being sent.
    time.sleep(0.01)
  for step in (1, 2):
    background.write({"loss": 1.0}, step)
  background.close()
  kept.may_go_on.set()
  assert "it did not take all within 0.2 s" in warnings[0]


@pytest.mark.parametrize(
  ("chosen", "words"),
  [
    (trackers.WeightsAndBiases(), r"tracker=wandb needs wandb: .*\[wandb\]'"),
    (trackers.MLflow(), r"tracker=mlflow needs mlflow: .*\[mlflow\]'"),
  ],
)
def test_a_missing_package_is_refused_with_its_extra(
  chosen, words, monkeypatch
):
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  with pytest.raises(ValueError, match=words):
    chosen.validate_installed()


def _records(data: bytes) -> Iterator[bytes]:
  """Yields the records of a .wandb file, which is a log of LevelDB's form."""
  # Blocks of 32 KiB; a part of a record is a sum (4 bytes), its length (2), its
  # kind (1; 1 is a whole record, 4 the last part of one) and itself.
  at, record = 7, b""  # Behind the head of the file.
  while at + 7 <= len(data):
    room = 32768 - at % 32768
    if room < 7:
      at += room
      continue
    length, kind = struct.unpack_from("<HB", data, at + 4)
    record += data[at + 7 : at + 7 + length]
    at += 7 + length
    if kind in (1, 4):
      yield record
      record = b""


def _offline_rows(directory: pathlib.Path) -> list[dict[str, str]]:
  """Returns the history in the files that `wandb sync` would send."""
  wandb_records = pytest.importorskip("wandb.proto.wandb_internal_pb2")

  rows = []
  for file in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
    for data in _records(file.read_bytes()):
      record = wandb_records.Record.FromString(data)
      if record.WhichOneof("record_type") == "history":
        items = record.history.item
        rows.append(
          {x.key or ".".join(x.nested_key): x.value_json for x in items}
        )
  return rows


@pytest.mark.process
def test_wandb_keeps_files_offline_and_goes_on_with_its_run(tmp_path):
  pytest.importorskip("wandb")
  chosen = trackers.WeightsAndBiases(mode="offline")
  ids = []
  for step in (1, 2):
    opened = chosen.open(tmp_path, SETTINGS)
    opened.write({"success": step / 4}, step)
    opened.close()
    ids.append((tmp_path / trackers.TRACKER_ID).read_text())
  assert ids[0] == ids[1]
  # A process of theirs writes the file, a moment after the run was closed.
  end_s = time.monotonic() + machine_speed.scaled(30)
  while len(_offline_rows(tmp_path)) < 2 and time.monotonic() < end_s:
    time.sleep(0.01)
  rows = _offline_rows(tmp_path)
  kept = [{name: x[name] for name in ("success", "round")} for x in rows]
  assert kept == [
    {"success": "0.25", "round": "1"},
    {"success": "0.5", "round": "2"},
  ]


@pytest.mark.process
def test_wandb_without_an_account_is_refused(tmp_path, monkeypatch):
  pytest.importorskip("wandb")
  monkeypatch.setenv("HOME", str(tmp_path))
  monkeypatch.setenv("NETRC", str(tmp_path / "none"))
  monkeypatch.delenv("WANDB_API_KEY", raising=False)
  with pytest.raises(trackers.TrackerFailed, match=r"tracker\.mode=offline"):
    trackers.WeightsAndBiases().open(tmp_path, SETTINGS)


def test_mlflow_keeps_a_run_and_goes_on_with_it(tmp_path):
  mlflow = pytest.importorskip("mlflow")
  pytest.importorskip("sqlalchemy")
  uri = f"sqlite:///{tmp_path}/mlflow.db"
  chosen = trackers.MLflow(uri=uri)
  for step in (1, 2):
    opened = chosen.open(tmp_path, SETTINGS)
    opened.write({"success": step / 4}, step)
    opened.close()
  client = mlflow.MlflowClient(uri)
  run_id = (tmp_path / trackers.TRACKER_ID).read_text().strip()
  history = client.get_metric_history(run_id, "success")
  assert [(x.step, x.value) for x in history] == [(1, 0.25), (2, 0.5)]
  run = client.get_run(run_id)
  assert run.info.status == "FINISHED"
  assert run.data.params == {"seed": "3", "overlap.max_staleness": "1"}


def test_an_mlflow_store_that_cannot_be_used_is_refused(tmp_path):
  pytest.importorskip("mlflow")
  chosen = trackers.MLflow(uri="nonsense://store")
  with pytest.raises(trackers.TrackerFailed, match=r"--config\.tracker\.uri"):
    chosen.open(tmp_path, SETTINGS)


def test_an_id_that_is_none_is_not_used(tmp_path):
  pytest.importorskip("mlflow")
  pytest.importorskip("sqlalchemy")
  (tmp_path / trackers.TRACKER_ID).write_text("../../x\n")
  chosen = trackers.MLflow(uri=f"sqlite:///{tmp_path}/mlflow.db")
  chosen.open(tmp_path, SETTINGS).close()
  assert (tmp_path / trackers.TRACKER_ID).read_text().strip().isalnum()
