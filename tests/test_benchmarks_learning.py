"""The learning benchmark without its runs: which there are, what they say."""

import collections
import dataclasses
import json
import re
from xml.etree import ElementTree

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
  learning,
  learning_picture,
  learning_runs,
  learning_summary,
)
from rl.algorithms import packed_row

CASES = list(learning_runs.grid([0, 1]))


def run(
  algorithm: str = "grpo",
  schedule: str = "eta4",
  arm: str = "ratio",
  seed: int = 0,
  curve: tuple[float, ...] = (0.5, 0.6, 0.7),
  learning_rate: float | None = None,
) -> learning_runs.Row:
  """Returns what a run might have been worth."""
  if learning_rate is None:
    learning_rate = learning_runs.LEARNING_RATES[algorithm]
  case = learning_runs.Case(
    algorithm=algorithm,
    schedule=schedule,
    arm=arm,
    seed=seed,
    learning_rate=learning_rate,
  )
  return {
    **dataclasses.asdict(case),
    "curve": list(curve),
    "played": 150,
    "trained": 100,
    "staleness": 4.0,
    "late": 3.5,
    "kl": [0.0, None, 0.01, 0.02, 0.03],
    "clipped": 0.25,
    "ess": None,
    "entropy": 0.5,
    "success": [0.5],
  }


# Which runs there are.


def test_every_algorithm_is_on_every_schedule_with_every_arm_that_it_has():
  # On policy one run, and three arms on four schedules; RLOO has no ratio.
  found = collections.Counter(case.algorithm for case in CASES)
  per_seed = {name: 1 + 3 * 4 for name in learning_runs.ALGORITHMS}
  per_seed["rloo"] = 1 + 2 * 4
  assert found == {name: 2 * count for name, count in per_seed.items()}
  assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES[::2], ids=lambda case: case.name)
def test_every_run_may_be_launched_and_trains_as_many_samples(case):
  experiment = learning_runs.experiment(case)
  experiment.validate()
  schedule = experiment.overlap
  updates = experiment.rounds * schedule.updates_per_round
  per_update = schedule.groups_per_update * experiment.rollout.group_size
  assert updates == learning_runs.UPDATES
  assert per_update == learning_runs.SAMPLES


@pytest.mark.parametrize("schedule", ["pipe", "eta1", "eta2", "eta4"])
def test_a_run_that_is_not_corrected_would_be_refused(schedule):
  case = learning_runs.Case(
    algorithm="grpo",
    schedule=schedule,
    arm="uncorrected",
    seed=0,
    learning_rate=1e-3,
  )
  one = learning_runs.experiment(case)
  plain = dataclasses.replace(one.algorithm, correction=None)
  with pytest.raises(ValueError, match="old_logprob=recompute"):
    dataclasses.replace(one, algorithm=plain).validate()


@pytest.mark.compiled
def test_what_is_left_untouched_weighs_1_however_far_the_policy_has_moved():
  zeros = jnp.zeros(3)
  row = packed_row.Row(
    logprobs=zeros,
    old=zeros,
    behaviour=jnp.array([-5.0, 5.0, jnp.nan]),
    advantages=zeros,
    sampled=jnp.array([True, True, False]),
    segments=jnp.zeros(3, jnp.int32),
  )
  found = learning_runs.Untouched()(row)
  np.testing.assert_array_equal(found.weights, [1.0, 1.0, 1.0])
  assert not (found.truncated | found.masked).any()


def test_learning_rates_are_chosen_by_sync_alone():
  chosen = learning_runs.LEARNING_RATES["dapo"]
  cases = [
    case
    for case in learning_runs.tuning([0, 1], [chosen, 9.0])
    if case.algorithm == "dapo"
  ]
  assert len(cases) == 4
  assert {case.schedule for case in cases} == {"sync"}
  # Those with the chosen rate are runs of the grid as well.
  assert len(set(cases) & set(CASES)) == 2


def test_a_round_counts_by_its_tokens():
  first = {
    "trained_tokens": 100.0,
    "lag_share/0": 0.5,
    "lag_share/4": 0.5,
    "behaviour_kl/lag_0": 0.0,
    "behaviour_kl/lag_4": 0.1,
    "clip_fraction": 0.1,
    "updates_late_max": 1.0,
    "staleness_mean": 4.0,
    "skipped_updates": 0.0,
    "success": 0.5,
  }
  second = first | {
    "trained_tokens": 300.0,
    "lag_share/0": 0.0,
    "lag_share/4": 1.0,
    "behaviour_kl/lag_0": float("nan"),
    "behaviour_kl/lag_4": 0.2,
    "clip_fraction": 0.5,
    "staleness_mean": 2.0,
    "skipped_updates": 1.0,
  }
  found = learning_runs.described([first, second])
  # 350 of 400 tokens are 4 rounds late, and half of all updates one more.
  assert found["late"] == pytest.approx(4 * 350 / 400 + 0.5)
  # (50 * 0.1 + 300 * 0.2) / 350
  assert found["kl"][0] == 0.0
  assert found["kl"][1] is None
  assert found["kl"][4] == pytest.approx(0.18571)
  assert found["clipped"] == pytest.approx((10 + 150) / 400)
  assert found["staleness"] == 3.0
  assert found["ess"] is None
  assert found["skipped"] == 1.0


# Running them.


def test_a_process_has_runs_of_the_same_programs_and_not_too_many():
  blocks = learning.blocks(CASES)
  assert [case for block in blocks for case in block] == CASES
  for block in blocks:
    assert len({(c.algorithm, c.arm, c.learning_rate) for c in block}) == 1
    assert 1 <= len(block) <= 15
  # No file is written by two processes.
  names = [learning._stem(block[0]) for block in blocks]
  assert len(set(names)) == len(names)


def test_a_line_that_was_cut_off_is_left_out_and_may_be_followed(tmp_path):
  whole = json.dumps(run()) + "\n"
  file = tmp_path / "0.jsonl"
  file.write_text(whole + whole[:20])
  assert learning.finished(tmp_path) == [run()]
  learning.seal(tmp_path)
  with file.open("a") as out:
    out.write(json.dumps(run(seed=1)) + "\n")
  assert learning.finished(tmp_path) == [run(), run(seed=1)]


def test_a_run_that_two_files_have_counts_once(tmp_path):
  for name in ("0", "1"):
    (tmp_path / f"{name}.jsonl").write_text(json.dumps(run()) + "\n")
  assert learning.finished(tmp_path) == [run()]


def test_a_row_says_which_run_it_is_of():
  for case in CASES:
    row = run(**dataclasses.asdict(case))
    assert learning_runs.case_of(row) == case


def test_what_is_kept_is_read_again(tmp_path):
  rows = [run(), run(seed=1)]
  learning.keep(rows, tmp_path / "learning.json")
  result = json.loads((tmp_path / "learning.json").read_text())
  assert result["rows"] == rows
  assert "cores" in result["machine"]


# What they say.


def test_the_area_is_by_trapezoids():
  # (0 + 1) / 2 and (1 + 0.5) / 2, over two intervals.
  assert learning_summary.area(run(curve=(0.0, 1.0, 0.5))) == 0.625


def test_a_spread_is_over_the_seeds_of_one_cell():
  table = learning_summary.Table(
    [
      run(curve=(0.4, 0.6)),
      run(curve=(0.4, 0.9), seed=1),
      run(curve=(0.4, 0.0), schedule="eta2"),
      run(curve=(0.4, 0.0), arm="truncated"),
      run(curve=(0.4, 0.0), learning_rate=1.0),
    ]
  )
  found = table.spread("grpo", "eta4", "ratio")
  assert found == learning_summary.Spread(0.75, 0.6, 0.9)
  assert table.spread("dapo", "eta4", "ratio") is None


def test_on_policy_all_arms_are_one_run():
  table = learning_summary.Table([run(schedule="sync", arm="on policy")])
  cells = [table.spread("grpo", "sync", arm) for arm in learning_summary.LATE]
  assert cells == [learning_summary.Spread(0.7, 0.7, 0.7)] * 3


def test_costs_are_points_against_sync_and_against_what_is_uncorrected():
  table = learning_summary.Table(
    [
      run(schedule="sync", arm="on policy", curve=(0.5, 0.8)),
      run(arm="uncorrected", curve=(0.5, 0.2)),
      run(arm="uncorrected", curve=(0.5, 0.0), seed=1),  # Paired with none.
      run(arm="ratio", curve=(0.5, 0.75)),
      run(arm="truncated", curve=(0.5, 0.5)),
      run("rloo", "sync", "on policy", curve=(0.5, 0.8)),
      run("rloo", arm="uncorrected", curve=(0.5, 0.4)),
    ]
  )
  lines = learning_summary.costs(table).splitlines()
  assert "| GRPO | -60 | +55 | +30 | -5 | -30 |" in lines
  assert "| RLOO | -40 | – | – | – | – |" in lines
  assert "| DAPO | – | – | – | – | – |" in lines
  assert lines[-1] == "| mean | -50 | +55 | +30 | -5 | -30 |"


def test_the_page_has_a_line_for_each_algorithm_and_arm():
  page = learning_summary.page(learning_summary.Table([run()]), "a machine")
  sections = re.split(r"^## ", page, flags=re.MULTILINE)
  (at_the_end,) = [s for s in sections if s.startswith("Success at equal")]
  lines = [line for line in at_the_end.splitlines() if "| GRPO" in line]
  assert lines == [
    "| GRPO | uncorrected | 0 | – | – | – | – | – |",
    "| GRPO | ratio | 0–1 | – | – | – | – | 70% (70–70) |",
    "| GRPO | truncated | 0 | – | – | – | – | – |",
  ]
  (late,) = [s for s in sections if s.startswith("How late")]
  assert "| eta 4 | 4.00 (4.00–4.00) | 3.50 (3.50–3.50) |" in late
  assert (
    "| GRPO | ratio | 0.0e+00 | – | 1.0e-02 | 2.0e-02 | 3.0e-02 | 0.25 | – | "
    "0.50 | 1.50 (1.50–1.50) |"
  ) in late


def test_rates_are_compared_by_the_seeds_that_all_have_run():
  chosen = learning_runs.LEARNING_RATES["grpo"]
  rows = [
    run("grpo", "sync", "on policy", seed=seed, curve=(0.0, curve))
    for seed, curve in enumerate((0.2, 0.4, 1.0))
  ]
  rows += [
    run("grpo", "sync", "on policy", seed=seed, curve=(0.0, 0.1),
        learning_rate=9.0)
    for seed in (0, 1)
  ]  # fmt: skip
  table = learning_summary.Table([*rows, run()])
  assert [row["seed"] for row in table.rates("grpo")[chosen]] == [0, 1]
  (line,) = [
    x
    for x in learning_summary.rates(table).splitlines()
    if "GRPO |" in x and "Dr" not in x
  ]
  assert line == f"| GRPO | 15% (10–20) | 5% (5–5) | {chosen:g} |"


def test_the_picture_has_a_panel_for_each_algorithm_and_a_curve_for_each_arm():
  rows = [run(**dataclasses.asdict(case)) for case in CASES]
  picture = learning_picture.draw(learning_summary.Table(rows))
  root = ElementTree.fromstring(picture)
  names = {element.text for element in root.iter() if element.text}
  assert set(learning_summary.NAMES.values()) <= names
  curves = [e for e in root.iter() if e.tag.endswith("polyline")]
  assert len(curves) == 6 * 3 - 1
  # A point a schedule.
  assert {len(e.attrib["points"].split()) for e in curves} == {5}


def test_a_picture_of_nothing_can_be_drawn():
  picture = learning_picture.draw(learning_summary.Table([]))
  assert ElementTree.fromstring(picture).tag.endswith("svg")
