"""Docstrings state the bias that is measured on the exact oracle."""

import pytest

from benchmarks import estimator_bias
from rl.algorithms import kl, loss_aggregation

pytestmark = [pytest.mark.compiled, pytest.mark.slow]


def words(subject: object) -> str:
  return " ".join((type(subject).__doc__ or "").split())


@pytest.mark.parametrize("name", estimator_bias.LOSSES)
def test_losses_state_their_bias_off_policy(name):
  rule = estimator_bias.LOSSES[name]
  measured = estimator_bias.measure(rule)
  assert estimator_bias.sentence(measured) in words(rule.loss)


@pytest.mark.parametrize("name", estimator_bias.CORRECTIONS)
def test_corrections_state_the_bias_that_they_leave(name):
  rule = estimator_bias.CORRECTIONS[name]
  measured = estimator_bias.measure(rule)
  assert estimator_bias.sentence(measured) in words(rule.correction)


@pytest.mark.parametrize("name", estimator_bias.STATED)
def test_estimators_state_their_bias_on_policy(name):
  estimator = estimator_bias.STATED[name]
  measured = estimator_bias.measure_estimator(estimator)
  assert estimator_bias.sentence_on_policy(measured) in words(estimator)


def test_sequence_mean_states_its_bias_on_policy():
  measured = estimator_bias.measure_aggregate(loss_aggregation.SequenceMean())
  stated = estimator_bias.sentence_on_policy(measured)
  assert stated in words(loss_aggregation.SequenceMean())


@pytest.mark.parametrize("estimator", ["k2", "k3_plus"])
def test_a_penalty_states_its_bias_as_a_loss_of_late_tokens(estimator):
  biases = []
  for weights in ("", ", not weighed"):
    penalty = estimator_bias.KL[estimator + weights]
    measured = estimator_bias.measure_kl(penalty)
    assert measured["lag 0"][0] < 1e-6
    biases += [measured[lag][0] for lag in ("lag 1", "lag 4")]
  first, last, *others = (f"{100 * bias:.0f} %" for bias in biases)
  stated = f"by {first} at lag 1 and {last} at lag 4; not weighed, by "
  assert stated + " and ".join(others) in words(kl.KlPenalty())
