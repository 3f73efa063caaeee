"""Notebooks: executed once, kept outputs are true, and so is what they claim.

One execution serves all. Outputs of cells with the tag "varies" depend on the
machine or its load: of those only the kinds are compared.
"""

import importlib
import json
import pathlib
import subprocess
import sys
import tempfile
import types

import nbformat
import pytest

from scripts import make_notebooks

# Expressions in the names that a notebook has at its end.
CLAIMS = {
  "first_steps": [
    "parts.router.stats().version == 1",
    "{v for g in groups for m in g.trajectories for t in m.turns"
    " for v in t.versions.tolist()} == {0}",
    "sampled_by == {1}",
    "abs(metrics['behaviour_kl']) < 1e-3 < metrics['grad_norm']",
  ],
  "losses": [
    # Fresh samples: float32 rounding is all that is left.
    "all(row[0] < 1e-4 for row in biases.values())",
    "all(min(biases.values(), key=lambda row: row[late])"
    " is biases['ratio, not clipped'] for late in (1, 2, 3, 4))",
    "biases['saturating'][1] > biases['PPO clip'][1]",
    "biases['saturating'][4] < biases['PPO clip'][4]",
    "best[16] < best[64] < best[1024]",
    "bounds[int(np.argmin(bias_of))] == 1.6",
    "list(bias_of[:-1]) == sorted(bias_of[:-1], reverse=True)",
    "list(noise_of) == sorted(noise_of)",
  ],
  "schedules": [
    "not any(result.violations for result in results.values())",
    "[*results] == sorted(results, key=lambda n: -results[n].step_s)",
    "results['sync'].overlap == 0",
    "all(max(r.token_lags) == eta for eta, r in bounds.items())",
    "[*bounds] == sorted(bounds, key=lambda eta: -bounds[eta].step_s)",
    "all(r.learner_idle['data'] < results['sync'].learner_idle['data']"
    " for n, r in results.items() if n != 'sync')",
  ],
  "planning": [
    "all(one.bound.step_s <= one.result.step_s for one in tried)",
    "len(tried) + len(left_out) == fastest.choices",
    "min(left_out) > best_s * (1 - question.tolerance)",
    "plans['cheapest'].best.cost < plans['fastest'].best.cost",
    "plans['on policy'].best.lag_max == 0",
    "plans['on policy'].best.result.step_s > 1.5 * best_s",
    "parts['1 strong']['learner'] > parts['4 strong']['learner']",
    # Four are far ahead by their parts, and not when simulated.
    "max(parts['4 strong'].values()) < 0.7 * max(parts['2 strong'].values())",
    "{one.choice.split[0] for one in tried[:2]} == {'2', '4'}",
    "tried[1].result.step_s < 1.05 * best_s",
    "[parts[f'{n} strong']['decode'] for n in (1, 2, 4)]"
    " == sorted(one['decode'] for one in parts.values())",
  ],
  "experts": [
    "all(c['nats'][-1] < 0.1 * c['nats'][0] for _, _, c in trained.values())",
    "np.mean(trained['with balance'][2]['busiest'][-20:])"
    " < np.mean(trained['without balance'][2]['busiest'][-20:])",
    "all(by_symbol(picture) > 0.75 for picture in pictures.values())",
    # A third would be even.
    "all(by_alphabet(picture) < 0.6 for picture in pictures.values())",
    "random_nats > 10 * chosen_nats",
  ],
  "environments": [
    "tried.returncode == trained.returncode == 0",
    "tried.stdout.rstrip().endswith('all is well')",
    "held_out['success'][0] < 0.6 < 0.9 < held_out['success'][-1]",
    "worst[0] == 0",
  ],
  "runs": [
    "apart",
    "[n for n in slow.settings if slow.settings[n] != quick.settings[n]]"
    " == ['optimizer.learning_rate']",
    "quick.metrics['entropy'][-1] < 0.8 * quick.metrics['entropy'][0]",
    "abs(slow.metrics['entropy'][-1] - slow.metrics['entropy'][0]) < 0.3",
    "np.nanmax(quick.metrics['behaviour_kl'])"
    " > 5 * np.nanmax(slow.metrics['behaviour_kl'])",
    "all(r.metrics['staleness_max'].max() <= 1 for r in runs.values())",
    "max(sure['rate 0.01'].values()) > 1.2 * max(sure['rate 0.001'].values())",
  ],
}
MAX_BYTES = 500_000

each = pytest.mark.parametrize(
  "script", make_notebooks.SCRIPTS, ids=lambda script: script.stem
)


def kept(script) -> nbformat.NotebookNode:
  """Returns the notebook as it lies beside its script."""
  return nbformat.read(script.with_suffix(".ipynb"), as_version=4)


@pytest.mark.slow
@each
def test_a_notebook_does_what_it_shows_and_claims(script, monkeypatch):
  monkeypatch.delenv("XLA_FLAGS")  # It asks for the devices that it needs.
  claims = CLAIMS[script.stem]
  executed = make_notebooks.execute(make_notebooks.read(script), claims)
  for cell, shown in zip(executed.cells, kept(script).cells, strict=True):
    found, expected = (list(make_notebooks.texts(one)) for one in (cell, shown))
    if "varies" in cell.metadata.get("tags", []):
      found, expected = ([kind for kind, _ in one] for one in (found, expected))
    assert found == expected, cell.source


@each
def test_a_kept_notebook_is_that_of_its_script(script):
  source, shown = make_notebooks.read(script), kept(script)
  assert [(c.cell_type, c.source, c.metadata) for c in shown.cells] == [
    (c.cell_type, c.source, c.metadata) for c in source.cells
  ], "run make notebooks"
  assert shown.metadata == source.metadata


@each
def test_a_kept_notebook_is_small_and_tells_nothing_of_its_machine(script):
  text = script.with_suffix(".ipynb").read_text()
  assert len(text) <= MAX_BYTES
  for place in (
    make_notebooks.ROOT,
    pathlib.Path.home(),
    tempfile.gettempdir(),
  ):
    assert f"{place}/" not in text
  for cell in kept(script).cells:
    outputs = cell.get("outputs", [])
    assert {o.get("name", "stdout") for o in outputs} <= {"stdout"}
    if cell.cell_type == "code" and "colab" not in cell.metadata.get(
      "tags", []
    ):
      assert cell.execution_count
    for kind, output in make_notebooks.texts(cell):
      assert "Warning" not in output, kind


@each
def test_each_notebook_begins_with_the_same_cell_for_colab(script, monkeypatch):
  cell = next(c for c in kept(script).cells if c.cell_type == "code")
  first = next(
    c for c in kept(make_notebooks.SCRIPTS[0]).cells if c.cell_type == "code"
  )
  assert cell.source == first.source
  assert cell.outputs == []
  called = []
  monkeypatch.setattr(subprocess, "run", lambda *a, **k: called.append((a, k)))
  exec(cell.source, {})
  assert not called
  name = "google.colab"
  files = types.SimpleNamespace(
    upload=lambda: {"twinmesh-0.1.0-py3-none-any.whl": b""}
  )
  monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
  monkeypatch.setattr(importlib, "import_module", {f"{name}.files": files}.get)
  exec(cell.source, {})
  wheel = "./twinmesh-0.1.0-py3-none-any.whl[envs]"
  command = [sys.executable, "-m", "pip", "install", wheel]
  assert called == [((command,), {"check": True})]


def test_timelines_need_no_network_and_no_kernel():
  (page,) = [
    output.data["text/html"]
    for cell in kept(make_notebooks.ROOT / "notebooks" / "schedules.py").cells
    for output in cell.get("outputs", [])
    if "text/html" in output.get("data", {})
  ]
  assert 'sandbox="allow-scripts"' in page
  assert "default-src &#x27;none&#x27;" in page
  assert json.dumps("in flight, 3 late")[1:-1] in page
