"""Tests of launch/report.py: numbers by hand, the page in a real browser."""

import html.parser
import json
import math
import random
import shutil
import subprocess
import xml.etree.ElementTree

import pytest

from launch import learning_curve, report
from rl import trace

_ROUNDS = 60
_SVG = "{http://www.w3.org/2000/svg}"


def _write_lines(path, rows):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _metrics(noise):
  """One odd row each: the largest gap, a fault, a number that is none."""
  for i in range(_ROUNDS):
    skill = 0.12 + 0.8 / (1 + math.exp(-(i - 25) / 7))
    yield {
      "round": i,
      "time_s": 2.5 * (i + 1),
      "version": i + 1,
      "success": min(1.0, max(0.0, skill + noise.gauss(0, 0.05))),
      "loss": noise.gauss(0, 0.01),
      "entropy": 1.6 - i / 60,
      "logprob_gap_max": 0.0125 if i == 40 else 0.001,
      "staleness_max": min(i, 1),
      "decode_tokens_per_s": 9000 + i,
      "learner_tokens_per_s": 4000,
      "faults/env": int(i == 7),
      "grad_norm": math.nan if i == 3 else 0.5,
    }


def _evaluations():
  for i, success in ((0, 0.1), (20, 0.31), (40, 0.88), (60, 0.94)):
    low, high = max(0.0, success - 0.06), min(1.0, success + 0.04)
    yield {
      "round": i,
      "success": success,
      "low": low,
      "high": high,
      "episodes": 200,
    }


def _spans(noise):
  """Each round takes 2.5 s; decoding goes on while the learner works."""
  for i in range(_ROUNDS):
    start = 2.5 * i
    for k in range(4):
      at = start + 0.2 + 0.5 * k
      yield "learner", "accumulate", at, at + 0.3 + 0.1 * noise.random()
    yield "learner", "update", start + 2.2, start + 2.35
    for k in range(30):
      at = start + 0.077 * k
      yield "decode", "decode" if k % 6 else "prefill", at, at + 0.07
    yield "host", "pack", start + 1.9, start + 2.2
    yield "host", "publish", start + 2.35, start + 2.45


def _events():
  for group in range(4 * _ROUNDS):
    version = group // 4
    # One group of four is trained one version late, those of round 0 cannot.
    late = int(group % 4 == 3 and version > 0)
    yield {
      "t": group / 4,
      "kind": "trained",
      "group": group,
      "version": version,
      "first_version": version - late,
      "tokens": 60,
      "masked": 0,
    }
  fault = {"group": 28, "index": 1, "status": "env_fault", "what": "raised"}
  yield {"t": 9.0, "kind": "fault", **fault}


def _turn(noise, version, words, context):
  return {
    "context": list(range(len(context))),
    "context_words": context,
    "tokens": list(range(len(words))),
    "words": words,
    "logprobs": [math.log(noise.uniform(0.05, 1)) for _ in words],
    "versions": [version] * (len(words) - 1) + [version + 1],
    "stop": "stop",
    "decode_s": 0.0821,
    "env_s": 0.0004,
  }


def _trajectories(noise, number):
  for k in range(8):
    group, index = 4 * number + k // 4, k % 4
    fault = number == 0 and k == 1
    won = noise.random() < (number + 5) / _ROUNDS
    say = ["I", "keep", "a", "number", ".", "Guess", "it", "."]
    turns = [
      _turn(noise, number, f"perhaps it is {guess} <end>".split(), say)
      for guess in noise.sample(range(20), noise.randint(1, 4))
    ]
    yield {
      "task_id": f"guess_number/train/{group}",
      "group_id": group,
      "index": index,
      "status": "env_fault" if fault else "completed",
      "reward": None if fault else float(won),
      "parts": {} if fault else {"outcome": float(won)},
      "fault": "TimeoutError: a step took 10 s" if fault else "",
      "advantage": 0.0 if fault else float(won) - 0.5,
      "turns": turns,
    }


@pytest.fixture
def run_dir(tmp_path):
  noise = random.Random(0)
  path = tmp_path / "guess_number"
  path.mkdir()
  config = {
    "stall_s": math.inf,
    "overlap": {"groups_per_round": 4, "max_staleness": 1},
  }
  (path / "config.json").write_text(json.dumps(config))
  _write_lines(path / "metrics.jsonl", _metrics(noise))
  _write_lines(path / "evaluations.jsonl", _evaluations())
  spans = [
    {"track": a, "name": b, "start": c, "end": d, "args": {}}
    for a, b, c, d in _spans(noise)
  ]
  _write_lines(path / "spans.jsonl", spans)
  _write_lines(path / "events.jsonl", _events())
  for i in range(0, _ROUNDS, 10):
    name = f"trajectories/round_{i:06d}.jsonl"
    _write_lines(path / name, _trajectories(noise, i))
  return path


class _Page(html.parser.HTMLParser):
  """Elements and text of a page as a browser left it, without scripts."""

  def __init__(self, text):
    super().__init__()
    self.elements, self.text = [], []
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.elements.append((tag, dict(attrs)))

  def handle_data(self, data):
    if self.elements[-1:] and self.elements[-1][0] not in ("script", "style"):
      self.text.append(data)

  def having(self, attribute, *words):
    """Attributes of the elements whose `attribute` holds all the words."""
    return [
      attrs
      for _, attrs in self.elements
      if attribute in attrs and {*words} <= {*attrs[attribute].split()}
    ]

  @property
  def body(self):
    return next(attrs for tag, attrs in self.elements if tag == "body")


@pytest.fixture
def browse(tmp_path):
  """Opens a page in a browser, runs a script at its end, returns the result."""
  names = ("chromium", "chromium-browser", "google-chrome")
  browser = next(filter(None, map(shutil.which, names)), None)
  if browser is None:
    pytest.skip(f"no browser on PATH: {', '.join(names)}")

  def run(page, script=""):
    opened = page.with_name("opened.html")
    opened.write_text(page.read_text() + f"<script>{script}</script>")
    flags = (
      "headless no-sandbox disable-gpu disable-quic no-first-run "
      "disable-background-networking disable-component-update disable-sync "
      f"user-data-dir={tmp_path}/browser virtual-time-budget=2000 "
      "window-size=1280,2000 dump-dom"
    )
    command = [browser, *(f"--{flag}" for flag in flags.split())]
    done = subprocess.run(
      [*command, f"file://{opened}"],
      capture_output=True,
      text=True,
      timeout=60,
      check=True,
    )
    result = _Page(done.stdout)
    assert "data-error" not in result.body, result.body["data-error"]
    assert result.body["data-ready"] == "true"
    return result

  return run


def test_the_page_draws_every_part_of_a_run(run_dir, browse):
  page = browse(report.write(run_dir))
  lines = [attrs for tag, attrs in page.elements if tag == "polyline"]
  assert [len(line["points"].split()) for line in lines] == [_ROUNDS, _ROUNDS]
  # 4 evaluations are dots; lags 0 and 1 are bars; 9 outcomes are tiles.
  assert len([tag for tag, _ in page.elements if tag == "circle"]) == 4
  assert len([tag for tag, _ in page.elements if tag == "rect"]) == 2
  assert len(page.having("class", "tile")) == 9
  (canvas,) = [attrs for tag, attrs in page.elements if tag == "canvas"]
  # Four rounds of 5 learner, 30 decode and 2 host spans are in view.
  assert 4 * 37 <= int(canvas["data-drawn"]) <= 5 * 37
  # 6 rounds of 2 groups of 4, and the 4 members next to the chosen one.
  assert len(page.having("class", "chip")) == 48
  assert len(page.having("class", "member")) == 4
  assert page.having("class", "token")
  assert not page.having("class", "notes")


def test_clicks_zoom_choose_a_metric_filter_and_open_a_trajectory(
  run_dir, browse
):
  page = browse(
    report.write(run_dir),
    """
      document.querySelector("[data-all]").click();
      const choose = (selector, value) => {
        const select = document.querySelector(selector);
        select.value = value;
        select.dispatchEvent(new Event("change"));
      };
      choose("#metric", "entropy");
      choose("[data-filter=reward]", "none");
      document.querySelectorAll(".member")[2].click();
      """,
  )
  (canvas,) = [attrs for tag, attrs in page.elements if tag == "canvas"]
  # Less than all 60 * 37 spans: those below a pixel are drawn as one.
  assert 5 * 37 < int(canvas["data-drawn"]) < 60 * 37
  assert page.having("aria-label", "entropy")
  # The fault is member 1 of group 0; its neighbour 2 was opened instead.
  assert len(page.having("class", "chip")) == 1
  assert [a["data-key"] for a in page.having("aria-pressed", "true")] == [
    "0/0/2"
  ]


def test_an_empty_directory_renders_and_says_what_is_missing(tmp_path, browse):
  page = browse(report.write(tmp_path))
  text = " ".join(page.text)
  for name in ("config.json", "metrics.jsonl", "evaluations.jsonl"):
    assert f"{name} is missing" in text
  for name in ("spans.jsonl", "events.jsonl", "trajectories/"):
    assert f"{name} is missing" in text
  assert "No span recorded." in text
  xml.etree.ElementTree.parse(tmp_path / "learning_curve.svg")


def test_cut_last_lines_are_left_out_and_said(run_dir, browse):
  names = ("metrics", "evaluations", "spans", "events")
  for path in [
    *(run_dir / f"{name}.jsonl" for name in names),
    *(run_dir / "trajectories").iterdir(),
  ]:
    path.write_text(path.read_text()[:-5])
  text = " ".join(browse(report.write(run_dir)).text)
  for name in (*names, "round_000010"):
    assert f"{name}.jsonl: unreadable lines left out: 1." in text


def test_text_of_the_run_never_becomes_markup(run_dir, browse):
  evil = "</script><img src=x onerror=alert(1)><!--{{title}}"
  path = run_dir / "trajectories" / "round_000000.jsonl"
  first = json.loads(path.read_text().splitlines()[0])
  first["turns"][0]["words"][0] = evil
  _write_lines(path, [first | {"task_id": evil}])
  page = browse(report.write(run_dir))
  assert "img" not in {tag for tag, _ in page.elements}
  assert evil in page.text


def test_the_page_refers_to_nothing_else(run_dir):
  text = report.write(run_dir).read_text()
  for word in ("src=", "href=", "url(", "@import", "fetch(", "import("):
    assert word not in text


def test_tiles_hold_the_outcome(run_dir):
  found = {label: (v, n) for label, v, n in report.tiles(report.read(run_dir))}
  assert found["Success"] == ("10% → 94%", "held out; last 88% to 98%")
  # 60 rounds of 2.5 s are 150 s.
  assert found["Wall time"][0] == "2 min 30 s"
  assert found["Largest lag"] == ("1", "rounds; the bound is 1")
  # The median of 9000 .. 9059 is 9029.5, and Python rounds half to even.
  assert found["Decode"][0] == "9,030"
  assert found["Log-prob gap"][0] == "0.013"
  assert found["Faults"] == ("1", "env_fault 1")


def test_a_repeated_round_counts_once_and_a_number_that_is_none_is_left_out(
  tmp_path,
):
  rows = [
    {"round": 1, "success": 0.5},
    {"round": 2, "success": 0.1},
    {"round": 2, "success": math.nan},
  ]
  _write_lines(tmp_path / "metrics.jsonl", rows)
  run = report.read(tmp_path)
  assert [row["success"] for row in run.metrics] == [0.5, None]


def test_what_a_resume_superseded_is_not_counted(tmp_path):
  # Trained at version 1, killed, trained again: 2 groups, not 3.
  def trained(group):
    fields = {"group": group, "version": group, "first_version": 0}
    return {"kind": "trained", "tokens": 1, "masked": 0, **fields}

  fault = {"kind": "fault", "group": 1, "index": 0, "status": "env_fault"}
  resumed = {"kind": "resumed", "trained": 1}
  rows = [trained(0), fault, trained(1), resumed, trained(1)]
  _write_lines(tmp_path / "events.jsonl", rows)
  found = {label: rest for label, *rest in report.tiles(report.read(tmp_path))}
  assert found["Rounds"][1] == "2 groups trained"
  assert found["Faults"][0] == "0"


def test_a_sample_of_trajectories_is_whole_groups_spread_over_the_rounds(
  tmp_path,
):
  # 100 rounds of 3 groups of 16 are too many. 40 rounds are read, and 400 / 16
  # = 25 groups fit: one each of the first 25 rounds in spread order. With a
  # step of 4 that order is through after 25: every fourth from the last.
  noise = random.Random(0)
  for i in range(100):
    rows = [
      dict(group_id=3 * i + k // 16, task_id="t", index=k % 16, turns=[])
      for k in range(48)
    ]
    noise.shuffle(rows)
    _write_lines(tmp_path / f"round_{i:06d}.jsonl", rows)
  found = report.sample_trajectories(tmp_path, [])
  assert len(found) == 400
  assert sorted({row["round"] for row in found}) == list(range(3, 100, 4))
  assert [row["index"] for row in found] == list(range(16)) * 25


def test_the_picture_holds_curve_evaluations_and_publishes(run_dir):
  report.write(run_dir)
  root = xml.etree.ElementTree.parse(run_dir / "learning_curve.svg").getroot()
  raw, smoothed = root.findall(f"{_SVG}polyline")
  assert len(raw.attrib["points"].split()) == _ROUNDS
  assert len(smoothed.attrib["points"].split()) == _ROUNDS
  # 2 dots of the legend, 4 evaluations, 1 dot of the strip's legend and its 5
  # publishes (four periods have five ends).
  assert len(root.findall(f"{_SVG}circle")) == 2 + 4 + 1 + 5


def test_the_window_is_four_publishing_periods_of_the_middle():
  # Publishes end at 1, 3, 5 ... 19; the middle one of ten is 11: [7, 15].
  spans = [
    trace.Span("host", "publish", 2.0 * i, 2.0 * i + 1) for i in range(10)
  ]
  assert learning_curve.window(spans) == (7.0, 15.0)
  assert learning_curve.window(spans[:4]) == (0.0, 7.0)


def test_smoothing_is_a_mean_over_a_twenty_fifth_of_the_run_each_way():
  # Three values: one neighbour each way. (1+2)/2, (1+2+6)/3, (2+6)/2.
  assert learning_curve.smooth([1.0, 2.0, 6.0]) == [1.5, 3.0, 4.0]


def test_ticks_are_round_numbers_within_the_range():
  # 50 / 7 = 7.1, so the step is 10, from 10 (5 is below) to 50.
  assert learning_curve.ticks(5, 55) == [10, 20, 30, 40, 50]
  assert learning_curve.ticks(0, 0.35) == [
    0,
    0.05,
    0.1,
    0.15,
    0.2,
    0.25,
    0.3,
    0.35,
  ]
