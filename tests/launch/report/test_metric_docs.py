"""docs/metrics.md explains what runs write: all of it, and nothing else."""

import dataclasses
import json

import pytest

from envs.offload import process_pool
from envs.rewards import rewards
from launch.report import metric_docs
from launch.run import local
from models import config as model_config
from rl import experiment
from rl.algorithms import (
  corrections,
  kl,
  presets,
  references,
  token_selection,
)
from rl.engine.builtin import settings as engine_settings
from rl.pools import affinity, hand_over, placement, routing_table
from rl.rollout import group_rollout
from rl.schedule import overlap
from rl.settings import overrides
from rl.testing import fakes

pytestmark = pytest.mark.compiled

PAGE = """
| name | unit | formula | meaning | worse |
|---|---|---|---|---|
| `loss` | – | sum / count | what is minimised | – |
| `lag_share/<k>` | share | late / all | how old tokens are | ↑ |
| `source/<source>/groups` | groups | count | groups of its own | – |

| name | other |
|---|---|
| `no_metric` | of another table |
"""


@pytest.fixture
def page(tmp_path):
  path = tmp_path / "metrics.md"
  path.write_text(PAGE)
  return path


def test_rows_of_its_tables_and_of_no_others_are_read(page):
  found = metric_docs.entries(page)
  assert [x.name for x in found] == [
    "loss",
    "lag_share/<k>",
    "source/<source>/groups",
  ]
  assert found[1].worse == "↑"


def test_families_match_numbers_or_names(page):
  names = ["lag_share/12", "lag_share/x", "source/game/groups", "source/a/b"]
  found = metric_docs.explain([*names, "loss", "no_metric"], page)
  assert list(found) == ["lag_share/12", "source/game/groups", "loss"]
  assert found["lag_share/12"] == (
    "How old tokens are. Formula: late / all. Unit: share. Worse when higher."
  )
  assert found["loss"] == "What is minimised. Formula: sum / count."


def test_without_the_page_nothing_is_explained(tmp_path):
  assert metric_docs.explain(["loss"], tmp_path / "metrics.md") == {}


# As much as one run can have: a critic, a KL, a correction, experts, late
# tokens, evaluations, a reward computed elsewhere.
EVERYTHING = experiment.Experiment(
  environment=fakes.Counting(turns=2),
  reward=process_pool.ProcessPool(reward=rewards.Outcome()),
  model=model_config.tiny_moe(
    vocab_size=7, num_layers=1, d_model=32, max_length=16
  ),
  rollout=group_rollout.Rollout(group_size=4, max_tokens=16),
  engine=engine_settings.EngineSettings(
    slots=32, row_buckets=(32,), chunk_buckets=(4,)
  ),
  overlap=dataclasses.replace(
    overlap.in_flight(4, 1, 2), old_logprob="recompute"
  ),
  batch=experiment.BatchShape(rows=8, length=16, tail_rows=None),
  algorithm=presets.Ppo(
    kl=kl.KlPenalty(weight=0.1),
    reference=references.Initial(),
    correction=corrections.TokenTruncated(),
    covariance=token_selection.KlCov(),
  ),
  evaluation=experiment.Evaluation(episodes=4),
  rounds=3,
)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  """Every name that runs have written, evaluations with their prefix."""
  found = set()
  plain = dataclasses.replace(
    EVERYTHING, algorithm=presets.Grpo(), overlap=overlap.sync(4)
  )
  for tree in (EVERYTHING, plain):
    path = tmp_path_factory.mktemp("run")
    data = {
      "overlap": overrides.to_json(tree.overlap),
      "rollout": {"group_size": tree.rollout.group_size},
    }
    (path / "config.json").write_text(json.dumps(data))
    assert local.train(tree, path) == 0
    for file, start in (("metrics", ""), ("evaluations", "evaluation/")):
      for line in (path / f"{file}.jsonl").read_text().splitlines():
        found |= {start + name for name in json.loads(line)}
  found |= _of_a_prefill_pool()
  return found - {"evaluation/round"}


def _of_a_prefill_pool():
  """Such a pool has processes of its own; what it adds is asked without."""
  infos = [
    placement.EngineInfo("decode"),
    placement.EngineInfo("encode", role="prefill"),
  ]
  table = routing_table.RoutingTable(infos, affinity.Routing(min_prefill_ids=1))
  table.assign("a", "game")
  table.send("one", "a", ids=8, versions=(1, 0))
  return {*table.describe(), *hand_over.HandOvers().describe()}


@pytest.mark.slow
@pytest.mark.process
def test_every_name_that_a_run_writes_is_explained_once(written):
  told = metric_docs.entries()
  counts = {name: [x.name for x in told if x.matches(name)] for name in written}
  assert {n: found for n, found in counts.items() if len(found) != 1} == {}


@pytest.mark.slow
@pytest.mark.process
def test_nothing_is_explained_that_no_run_writes(written):
  # What steps of fine-tuning write is shown by a run of pairs.
  told = [
    x for x in metric_docs.entries() if not x.name.startswith("warm_start/")
  ]
  assert len(told) > 80
  unknown = [
    x.name for x in told if not any(x.matches(name) for name in written)
  ]
  assert unknown == []


def test_every_row_says_all_there_is_to_say():
  for entry in metric_docs.entries():
    assert entry.meaning
    assert entry.formula
    assert entry.worse in ("↑", "↓", "↕", "–")
