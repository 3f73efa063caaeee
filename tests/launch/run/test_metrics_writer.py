import json
import math
import struct
import tracemalloc

from tensorboardX.proto import event_pb2

from launch.cli import run_repair
from launch.run import metrics_writer


def _rounds(path):
  return [json.loads(line)["round"] for line in path.read_text().splitlines()]


def _events(path):
  # A record is its length (8 bytes), a sum (4), the event and a sum (4).
  data, at = path.read_bytes(), 0
  while at < len(data):
    (size,) = struct.unpack_from("<Q", data, at)
    payload = data[at + 12 : at + 12 + size]
    yield event_pb2.Event.FromString(payload)  # pyright: ignore
    at += size + 16


def _scalars(directory):
  for path in directory.iterdir():
    for event in _events(path):
      for value in event.summary.value:
        yield value.tag, event.step, value.simple_value


def test_a_line_is_on_disk_when_write_returns(tmp_path):
  writer = metrics_writer.MetricsWriter(tmp_path / "run")
  writer.write(3, {"round": 3.0, "success": 0.5, "faults": 2})
  line = (tmp_path / "run/metrics.jsonl").read_text()
  assert line == '{"round": 3, "success": 0.5, "faults": 2.0}\n'
  writer.close()


def test_nan_and_inf_become_null(tmp_path):
  writer = metrics_writer.MetricsWriter(tmp_path)
  writer.evaluation(0, {"success": math.nan, "reward": -math.inf})
  line = (tmp_path / "evaluations.jsonl").read_text()
  assert line == '{"round": 0, "success": null, "reward": null}\n'
  writer.close()


def test_words_are_kept_as_they_are(tmp_path):
  writer = metrics_writer.MetricsWriter(tmp_path)
  writer.evaluation(0, {"faults": 2, "fault": "env_fault: late"})
  line = (tmp_path / "evaluations.jsonl").read_text()
  assert line == '{"round": 0, "faults": 2.0, "fault": "env_fault: late"}\n'
  writer.close()


def test_tensorboard_gets_the_same_numbers(tmp_path):
  writer = metrics_writer.MetricsWriter(tmp_path)
  writer.write(3, {"success": 0.5})
  writer.evaluation(3, {"success": 0.75, "fault": "env_fault: late"})
  writer.close()
  assert list(_scalars(tmp_path / "tensorboard")) == [
    ("success", 3, 0.5),
    ("evaluation/success", 3, 0.75),
  ]


def test_lines_that_are_no_rows_are_cut_out(tmp_path):
  path = tmp_path / "metrics.jsonl"
  lines = [b'{"round": 1}', b"null", b"[]", b'{"x": 1}', b'{"round": "1"}']
  path.write_bytes(b"\n".join([*lines, b"\xff", b'{"round": 2}\n']))
  assert metrics_writer.cut_back(path, 3) == {"round": 2}
  assert _rounds(path) == [1, 2]
  assert metrics_writer.cut_back(path, 1) is None
  assert _rounds(path) == []
  assert metrics_writer.cut_back(tmp_path / "none.jsonl", 3) is None


def test_a_long_file_is_cut_back_a_line_at_a_time(tmp_path):
  path, rows = tmp_path / "metrics.jsonl", 300
  row = json.dumps({"round": 0, "note": "x" * 20_000}) + "\n"
  path.write_text("".join(row.replace("0", str(i), 1) for i in range(rows)))
  tracemalloc.start()
  try:
    list(
      run_repair.mend(tmp_path, trees=(), files=(), rows={path.name: "round"})
    )
    metrics_writer.cut_back(path, rows - 1)
    _, peak = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  # 6 MB of lines of 20 kB.
  assert path.stat().st_size > 5_900_000
  assert peak < 1_000_000


def test_a_resumed_run_has_each_round_once(tmp_path):
  writer = metrics_writer.MetricsWriter(tmp_path)
  for index in range(5):
    writer.write(index, {"loss": math.nan if index == 2 else 1.0})
    writer.evaluation(index, {})
  writer.close()
  with (tmp_path / "metrics.jsonl").open("a") as file:
    file.write('{"round": 1, "succ')  # Killed while it wrote.
  resumed = metrics_writer.MetricsWriter(tmp_path, first_round=3)
  # It starts with an evaluation after round 2.
  resumed.evaluation(2, {})
  resumed.write(3, {})
  resumed.evaluation(3, {})
  resumed.close()
  assert _rounds(tmp_path / "metrics.jsonl") == [0, 1, 2, 3]
  assert _rounds(tmp_path / "evaluations.jsonl") == [0, 1, 2, 3]
  assert not list(tmp_path.glob("*.tmp"))


def test_a_resumed_run_purges_tensorboard_and_writes_its_last_round_again(
  tmp_path,
):
  writer = metrics_writer.MetricsWriter(tmp_path, first_round=1)
  for index in (1, 2, 3):
    writer.write(index, {"loss": index / 2})
  writer.evaluation(2, {"success": 0.5})
  writer.close()
  (tmp_path / "tensorboard").rename(tmp_path / "before")
  resumed = metrics_writer.MetricsWriter(tmp_path, first_round=3)
  resumed.close()
  (file,) = (tmp_path / "tensorboard").iterdir()
  starts = [e for e in _events(file) if e.HasField("session_log")]
  # Evaluation 2 is made again, so the purge begins there and takes loss 2 too.
  assert [event.step for event in starts] == [2]
  found = list(_scalars(tmp_path / "tensorboard"))
  assert ("loss", 2, 1.0) in found
  assert {tag for tag, _, _ in found} == {"round", "loss"}


class _Tracker:
  def __init__(self):
    self.rows = []

  def write(self, values, step):
    self.rows.append((step, dict(values)))

  def close(self):
    raise AssertionError("whoever opened it closes it")


def test_a_tracker_gets_each_round_once_without_what_is_not_finite(tmp_path):
  before, after = _Tracker(), _Tracker()
  writer = metrics_writer.MetricsWriter(tmp_path, tracker=before)
  writer.write(1, {"success": 0.5, "loss": math.nan})
  writer.evaluation(1, {"success": 0.75, "fault": "late"})
  writer.close()
  resumed = metrics_writer.MetricsWriter(tmp_path, first_round=2, tracker=after)
  resumed.write(2, {"success": 1.0})
  resumed.close()
  assert before.rows == [
    (1, {"success": 0.5}),
    (1, {"evaluation/success": 0.75}),
  ]
  assert after.rows == [(2, {"success": 1.0})]
