"""The page of a run: numbers by hand, and the page in a real browser."""

import json
import math
import random
import re
import resource
import xml.etree.ElementTree

import pytest

from launch.report import metric_docs
from launch.report import page as report_page
from rl.schedule import overlap
from rl.settings import overrides
from tests.helpers import commands, event_logs, viewed_runs

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
      "skipped_updates": 0,
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


SCHEDULE = overlap.in_flight(4, 1, 1)


def _events():
  """Four groups a round of one member; one engine fails one of them."""
  log = event_logs.run(SCHEDULE, _ROUNDS)
  i = event_logs.place(log, "reward", group=28, index=1)
  fault = {"kind": "fault", "status": "env_fault", "what": "raised"}
  return [*log[:i], log[i] | fault, *log[i + 1 :]]


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


def _gaps(noise):
  """3 of 40 tokens of every tenth round; one of round 20 is not finite."""
  for i in range(0, _ROUNDS, 10):
    engine = [-2 * noise.random() for _ in range(3)]
    yield {
      "round": i,
      "tokens": 40,
      "mean": 0.0005,
      "max": 0.25 if i == 20 else 0.001,
      "engine": engine,
      "learner": [None if i == 20 else engine[0], engine[1], engine[2] - 0.25],
      "lags": [0, 1, 1],
    }


@pytest.fixture
def run_dir(tmp_path):
  noise = random.Random(0)
  path = tmp_path / "guess_number"
  path.mkdir()
  config = {
    "progress_timeout_s": math.inf,
    "overlap": overrides.to_json(SCHEDULE),
    "rollout": {"group_size": event_logs.GROUP_SIZE},
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
  _write_lines(path / "logprob_gap.jsonl", _gaps(noise))
  for i in range(0, _ROUNDS, 10):
    name = f"trajectories/round_{i:06d}.jsonl"
    _write_lines(path / name, _trajectories(noise, i))
  return path


@pytest.mark.process
def test_the_page_draws_every_part_of_a_run(run_dir, browse):
  page = browse(report_page.write(run_dir))
  lines = [attrs for tag, attrs in page.elements if tag == "polyline"]
  assert [len(line["points"].split()) for line in lines] == [_ROUNDS, _ROUNDS]
  # 4 evaluations are dots, and so are 6 * 3 - 1 tokens that were compared;
  # 11 outcomes are tiles, and three that learning came to: success, entropy,
  # skipped updates.
  dots = [attrs for tag, attrs in page.elements if tag == "circle"]
  assert len([dot for dot in dots if dot.get("class") == "dot"]) == 4
  assert len([dot for dot in dots if dot.get("class") == "gap"]) == 17
  assert len(page.having("class", "tile")) == 14
  # Lags 0 and 1, and one length: all episodes of the log have the same, of
  # which one member in two is trained.
  tips = [attrs.get("data-tip", "") for attrs in page.having("class", "bar")]
  assert sum("versions late" in tip for tip in tips) == 2
  assert sum("episodes of" in tip for tip in tips) == 2
  # Each of 240 groups has waited, played, queued and trained.
  assert len(page.having("class", "age")) == 240 * 4
  assert not page.having("class", "broken")
  (canvas,) = [attrs for tag, attrs in page.elements if tag == "canvas"]
  # Four rounds of 5 learner, 30 decode and 2 host spans are in view.
  assert 4 * 37 <= int(canvas["data-drawn"]) <= 5 * 37
  # Of 6 rounds of 2 groups of 4 some rows are drawn, and the 4 members of the
  # group of the first one.
  assert 15 < len(page.having("role", "option")) < 48
  assert "48 of the 48 trajectories" in " ".join(page.text)
  assert len(page.having("class", "member")) == 4
  assert page.having("class", "token")
  assert not page.having("class", "notes")


def test_points_of_a_long_run_are_means_of_as_many_rounds(tmp_path):
  # 4,001 rounds make 1,334 points of 3 from the end, the first of 2.
  rows = [
    {"round": i, "time_s": 2.0 * i, "success": i % 2, "sampled_tokens": 10}
    for i in range(1, 4002)
  ]
  rows[10]["faults/env"] = 6
  _write_lines(tmp_path / "metrics.jsonl", rows)
  _write_lines(tmp_path / "evaluations.jsonl", _evaluations())
  found = report_page.data(report_page.read(tmp_path))
  columns = found["metrics"]
  assert found["every"] == 3
  assert {len(column) for column in columns.values()} == {1334}
  assert columns["round"][:3] == [2, 5, 8]
  assert columns["time_s"][-1] == 2 * 4001
  # Of rounds 1 and 2, then 3, 4 and 5, then 6, 7 and 8.
  assert columns["success"][:3] == [0.5, 0.666667, 0.333333]
  assert found["tokens"][:3] == [20, 50, 80]
  # What only round 11 recorded is the mean of that round.
  assert columns["faults/env"][:5] == [None, None, None, 6, None]
  assert len(found["evaluations"]) == 4


def _over(axis):
  """Returns a script that chooses the axis of the curves."""
  return f"""
      const select = document.querySelector("#axis");
      select.value = "{axis}";
      select.dispatchEvent(new Event("change"));
      """


@pytest.mark.process
def test_a_long_run_says_how_many_rounds_a_point_stands_for(tmp_path, browse):
  rows = [
    {"round": i, "success": 0.5, "sampled_tokens": 10} for i in range(1, 4001)
  ]
  _write_lines(tmp_path / "metrics.jsonl", rows)
  # Half way between the points at 998 and 1,000.
  row = {"round": 999, "success": 0.5, "low": 0.4, "high": 0.6, "episodes": 9}
  _write_lines(tmp_path / "evaluations.jsonl", [row])
  page = browse(report_page.write(tmp_path), _over("tokens"))
  text = " ".join(page.text)
  assert "Thin: mean of 2 rounds (metrics.jsonl has each)" in text
  line, _ = (attrs for tag, attrs in page.elements if tag == "polyline")
  at = [float(place.split(",")[0]) for place in line["points"].split()]
  assert len(at) == 2000
  (dot,) = page.having("class", "dot")
  assert at[498] <= float(dot["cx"]) <= at[499]


@pytest.mark.process
def test_an_evaluation_lies_at_its_own_second(tmp_path, browse):
  rows = [{"round": i, "success": 0.5, "time_s": 2.0 * i} for i in range(1, 5)]
  _write_lines(tmp_path / "metrics.jsonl", rows)
  # It ended half way between rounds 3 and 4.
  row = {"round": 2, "success": 0.5, "low": 0.4, "high": 0.6, "time_s": 7.0}
  _write_lines(tmp_path / "evaluations.jsonl", [row])
  page = browse(report_page.write(tmp_path), _over("time"))
  line, _ = (attrs for tag, attrs in page.elements if tag == "polyline")
  at = [float(place.split(",")[0]) for place in line["points"].split()]
  (dot,) = page.having("class", "dot")
  assert float(dot["cx"]) == pytest.approx((at[2] + at[3]) / 2, abs=0.1)


@pytest.mark.process
def test_of_many_evaluations_some_are_drawn_and_it_is_said(tmp_path, browse):
  rows = [{"round": i, "success": 0.5} for i in range(1, 1500)]
  _write_lines(tmp_path / "metrics.jsonl", rows)
  row = {"success": 0.5, "low": 0.4, "high": 0.6, "episodes": 9}
  _write_lines(
    tmp_path / "evaluations.jsonl",
    [{"round": i, **row} for i in range(1, 1500)],
  )
  page = browse(report_page.write(tmp_path), "")
  assert "interval, one in 3 evaluations." in " ".join(page.text)
  dots = page.having("class", "dot")
  # 1499 / 3, and the newest is one of them.
  assert len(dots) == 500
  assert "evaluation after round 1499\n" in dots[-1]["data-tip"]


@pytest.mark.process
def test_clicks_zoom_choose_a_metric_filter_and_open_a_trajectory(
  run_dir, browse
):
  page = browse(
    report_page.write(run_dir),
    """
      [...document.querySelectorAll("#timeline button")].at(-1).click();
      const choose = (selector, value) => {
        const select = document.querySelector(selector);
        select.value = value;
        select.dispatchEvent(new Event("change"));
      };
      choose("#metric", "entropy");
      choose("[data-filter=status]", "env_fault");
      document.querySelectorAll(".member")[2].click();
      """,
  )
  (canvas,) = [attrs for tag, attrs in page.elements if tag == "canvas"]
  # Less than all 60 * 37 spans: those below a pixel are drawn as one.
  assert 5 * 37 < int(canvas["data-drawn"]) < 60 * 37
  assert page.having("aria-label", "entropy")
  # The fault is member 1 of group 0; its neighbour 2 was opened instead.
  assert len(page.having("role", "option")) == 1
  assert [a["data-key"] for a in page.having("aria-pressed", "true")] == [
    "0/0/2"
  ]


@pytest.mark.process
def test_tokens_without_a_gap_lie_on_the_line_and_others_off_it(
  run_dir, browse
):
  page = browse(report_page.write(run_dir))
  (line,) = page.having("class", "identity")
  x1, y1, x2, y2 = (float(line[key]) for key in ("x1", "y1", "x2", "y2"))
  # What is 0.25 nats lower for the learner lies below: 1 of 3 tokens a round.
  below = [
    float(dot["cy"]) - (y1 + (float(dot["cx"]) - x1) * (y2 - y1) / (x2 - x1))
    for dot in page.having("class", "gap")
  ]
  assert sum(distance > 5 for distance in below) == 6
  assert sum(abs(distance) < 0.2 for distance in below) == 11
  text = " ".join(page.text)
  assert "17 of 240 tokens compared" in text
  assert "for lack of a finite number: 1." in text


@pytest.mark.process
def test_one_round_of_comparisons_can_be_chosen(run_dir, browse):
  page = browse(
    report_page.write(run_dir),
    """
      const select = document.querySelector("#gap-round");
      select.value = "20";
      select.dispatchEvent(new Event("change"));
      """,
  )
  assert len(page.having("class", "gap")) == 2
  # The table shows its largest gap.
  assert "0.25" in page.text
  assert "2 of 40 tokens compared" in " ".join(page.text)


@pytest.mark.process
def test_an_empty_directory_renders_and_says_what_is_missing(tmp_path, browse):
  page = browse(report_page.write(tmp_path))
  text = " ".join(page.text)
  for name in ("config.json", "metrics.jsonl", "evaluations.jsonl"):
    assert f"{name} is missing" in text
  for name in ("spans.jsonl", "events.jsonl", "trajectories/"):
    assert f"{name} is missing" in text
  assert _shown(page) == {"tiles", "settings"}
  xml.etree.ElementTree.parse(tmp_path / "learning_curve.svg")


@pytest.mark.process
def test_a_run_of_fine_tuning_shows_what_it_has(tmp_path, browse):
  viewed_runs.tuning(tmp_path)
  span = {"track": "learner", "name": "warm start", "start": 0.0, "end": 2.0}
  _write_lines(tmp_path / "spans.jsonl", [span])
  (tmp_path / "events.jsonl").touch()
  page = browse(report_page.write(tmp_path))
  assert _shown(page) == {"tiles", "warm-start", "timeline", "settings"}
  # Losses of 1 / step, of held-out rows after the second and the last of 4.
  tiles = report_page.tiles(report_page.read(tmp_path))
  assert tiles == [
    ("Warm start", "1 → 0.25", "nats a token, 4 steps"),
    ("Held out", "0.75 → 0.5", "nats a token"),
  ]


def _shown(page):
  """Returns the parts of a page that are not hidden."""
  return {
    attrs.get("id", "settings")
    for tag, attrs in page.elements
    if tag == "section" and "hidden" not in attrs
  }


@pytest.mark.process
def test_cut_last_lines_are_left_out_and_said(run_dir, browse):
  names = ("metrics", "evaluations", "spans", "events")
  # A cut log is that of a run that was killed: it breaks no promise.
  for path in [
    *(run_dir / f"{name}.jsonl" for name in names),
    *(run_dir / "trajectories").iterdir(),
  ]:
    path.write_text(path.read_text()[:-5])
  text = " ".join(browse(report_page.write(run_dir)).text)
  for name in (*names, "round_000010"):
    assert f"{name}.jsonl: unreadable lines left out: 1." in text


def test_an_evaluation_of_faults_alone_is_a_note_and_no_dot(run_dir):
  path = run_dir / "evaluations.jsonl"
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  rows[-1] |= {"success": None, "episodes": 0, "fault": "env_fault: no game"}
  _write_lines(path, rows)
  found = report_page.read(run_dir)
  assert [row["round"] for row in found.evaluations] == [0, 20, 40]
  note = "The evaluation of version 60 graded no episode: env_fault: no game."
  assert note in found.notes


@pytest.mark.process
def test_text_of_the_run_never_becomes_markup(run_dir, browse):
  evil = "</script><img src=x onerror=alert(1)><!--{{title}}"
  path = run_dir / "trajectories" / "round_000000.jsonl"
  first = json.loads(path.read_text().splitlines()[0])
  first["turns"][0]["words"][0] = evil
  _write_lines(path, [first | {"task_id": evil}])
  page = browse(report_page.write(run_dir))
  assert "img" not in {tag for tag, _ in page.elements}
  assert evil in page.text


def test_the_page_refers_to_nothing_else(run_dir):
  text = report_page.write(run_dir).read_text()
  for word in ("src=", "href=", "url(", "@import", "fetch(", "import("):
    assert word not in text


@pytest.mark.process
def test_what_a_metric_means_stands_beside_its_curve(run_dir, browse):
  page = browse(
    report_page.write(run_dir),
    """
      const select = document.querySelector("#metric");
      select.value = "entropy";
      select.dispatchEvent(new Event("change"));
      """,
  )
  text = " ".join(page.text)
  (entry,) = [x for x in metric_docs.entries() if x.name == "entropy"]
  assert str(entry) in text
  # It has taken the place of that of the first metric.
  assert "Training episodes that succeeded" not in text


@pytest.mark.process
def test_skipped_updates_stand_on_top_of_the_page(run_dir, browse):
  rows = [{"round": i, "skipped_updates": float(i > 1)} for i in (1, 2, 3)]
  _write_lines(run_dir / "metrics.jsonl", rows)
  kept = run_dir / "skipped" / "round_000003_update_0"
  kept.mkdir(parents=True)
  (kept / "batches.npz").touch()
  page = browse(report_page.write(run_dir))
  assert page.having("class", "notes")
  text = " ".join(page.text)
  assert "not finite, in rounds 2, 3. Look into one: python -m launch" in text
  assert f"{run_dir}/skipped/round_000003_update_0" in text


def test_tiles_hold_the_outcome(run_dir):
  found = {
    label: (v, n)
    for label, v, n in report_page.tiles(report_page.read(run_dir))
  }
  assert found["Success"] == ("10% → 94%", "held out; last 88% to 98%")
  # 60 rounds of 2.5 s are 150 s.
  assert found["Wall time"][0] == "2 min 30 s"
  assert found["Largest lag"] == ("1", "rounds; the bound is 1")
  # The median of 9000 .. 9059 is 9029.5, and Python rounds half to even.
  assert found["Decode"][0] == "9,030"
  assert found["Log-prob gap"][0] == "0.013"
  assert found["Faults"] == ("1", "env_fault 1")
  # 240 groups of 20 tokens; of each the second member is masked, and for one
  # of them that is because of its fault.
  assert found["Useful tokens"] == (
    "50%",
    "of 4,800; masked: no advantage 2,390, faults 10; dropped: none",
  )
  # Entropy falls by 1/60 a round, from 1.6; means over the first and last 6.
  assert found["Entropy"][0] == "1.56 → 0.658"


def test_a_repeated_round_counts_once_and_a_number_that_is_none_is_left_out(
  tmp_path,
):
  rows = [
    {"round": 1, "success": 0.5},
    {"round": 2, "success": 0.1},
    {"round": 2, "success": math.nan},
  ]
  _write_lines(tmp_path / "metrics.jsonl", rows)
  run = report_page.read(tmp_path)
  assert [row["success"] for row in run.metrics] == [0.5, None]


def test_what_is_no_number_is_left_out_of_a_page(tmp_path):
  odd = {"success": "x", "skipped_updates": [1], "behaviour_kl/lag_1": {}}
  _write_lines(tmp_path / "metrics.jsonl", [{"round": 1, **odd}])
  _write_lines(
    tmp_path / "evaluations.jsonl",
    [{"round": 1, "success": 0.5, "low": None, "high": "x"}],
  )
  run = report_page.read(tmp_path)
  assert not run.evaluations
  assert report_page.tiles(run)
  assert report_page.data(run)["metrics"]["success"] == [None]


def test_what_a_resume_superseded_is_not_counted(tmp_path):
  # Round 1 of 4 groups is trained, killed and trained again: 8 groups, not 12.
  log = event_logs.run(SCHEDULE, 2)
  i = event_logs.place(log, "published") + 1
  where = {"group": 5, "attempt": 0, "index": 0, "status": "env_fault"}
  lost = [{"t": 0.0, "kind": "fault", **where}]
  start = {"t": 0.0, "kind": "resumed", "trained": 1, "next_group": 8}
  begun = [e for e in log[:i] if e.get("group", 0) >= 4]
  rows = [*log[:i], *lost, *log[i:], start, *begun, *log[i:]]
  _write_lines(tmp_path / "events.jsonl", rows)
  found = {
    label: rest
    for label, *rest in report_page.tiles(report_page.read(tmp_path))
  }
  assert found["Rounds"][1] == "8 groups trained"
  assert found["Faults"][0] == "0"
  assert found["Invariants"] == ["hold", "not checked"]


def test_a_log_of_another_program_is_named_and_left_out(tmp_path):
  _write_lines(tmp_path / "events.jsonl", [{"t": 1.0, "kind": "trained"}])
  run = report_page.read(tmp_path)
  assert run.verdict is None
  assert "events.jsonl: an event lacks 'group'." in run.notes


@pytest.mark.process
def test_a_broken_promise_stands_on_the_page(run_dir, browse):
  log = event_logs.change(_events(), "trained", where={"group": 9}, masked=3)
  _write_lines(run_dir / "events.jsonl", log)
  found = {
    label: v for label, v, _ in report_page.tiles(report_page.read(run_dir))
  }
  assert found["Invariants"] == "2 broken"
  page = browse(report_page.write(run_dir))
  assert "2 broken promises; the first:" in page.text


def test_the_picture_holds_curve_evaluations_and_publishes(run_dir):
  report_page.write(run_dir)
  root = xml.etree.ElementTree.parse(run_dir / "learning_curve.svg").getroot()
  raw, smoothed = root.findall(f"{_SVG}polyline")
  assert len(raw.attrib["points"].split()) == _ROUNDS
  assert len(smoothed.attrib["points"].split()) == _ROUNDS
  # 2 dots of the legend, 4 evaluations, 1 dot of the strip's legend and its 5
  # publishes (four periods have five ends).
  assert len(root.findall(f"{_SVG}circle")) == 2 + 4 + 1 + 5
  # Of the same work as on the page.
  tiles = {
    label: x for label, x, _ in report_page.tiles(report_page.read(run_dir))
  }
  assert f"of the whole run: {tiles['Overlap']}" in "".join(root.itertext())


@pytest.mark.process
def test_a_directory_without_a_run_gets_no_report(tmp_path):
  done = commands.run("launch.report.__main__", f"--run={tmp_path}")
  assert done.returncode == 2
  assert f"{tmp_path} holds no run: no config.json" in done.stderr
  assert not list(tmp_path.iterdir())


@pytest.mark.process
def test_a_disk_that_takes_no_report_is_named(tmp_path):
  (tmp_path / "config.json").write_text("{}")
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
  try:
    done = commands.run("launch.report.__main__", f"--run={tmp_path}")
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert done.returncode == 1
  assert f"{tmp_path} cannot be written: File too large; " in done.stderr
  assert "TM-D09" in done.stderr


@pytest.mark.process
def test_several_runs_are_all_rendered_and_compared(tmp_path):
  for name, success in (("worse", 0.25), ("better", 0.75)):
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(f'{{"name": "{name}"}}')
    row = {"round": 1, "success": success}
    (tmp_path / name / "metrics.jsonl").write_text(json.dumps(row) + "\n")
  flags = [f"--run={tmp_path / name}" for name in ("worse", "better")]
  done = commands.run("launch.report.__main__", *flags)
  assert done.returncode == 0, done.stderr
  for name in ("worse", "better"):
    assert (tmp_path / name / "report.html").exists()
    assert f"{name}/report.html" in done.stdout
  # The best is first.
  assert done.stdout.rindex("better ") < done.stdout.rindex("worse ")


@pytest.mark.process
def test_several_runs_of_fine_tuning_are_compared_by_their_loss(tmp_path):
  runs = [
    viewed_runs.tuning(tmp_path / str(seed), seed=seed) for seed in (1, 2)
  ]
  flags = [f"--run={run}" for run in runs]
  done = commands.run("launch.report.__main__", *flags)
  assert done.returncode == 0, done.stderr
  assert re.search("run  *steps  *last warm_start/loss", done.stdout)
