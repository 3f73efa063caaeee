"""The selection of trained members, and the advantages of an update."""

import dataclasses

import numpy as np
import pytest

from rl.algorithms import advantages, group_selection, token_advantages
from rl.data import trajectory
from tests.helpers import played_members as played

OK, FAULT = played.OK, played.FAULT
WHITENED = token_advantages.ReinforcePlusPlus(baseline="group")


def _group(*members, task="game/train/0"):
  """Returns a group of (reward, sampled tokens) that ended well."""
  return played.group(*[(OK, r, [n]) for r, n in members], task=task)


def _update(groups, estimator):
  """Returns (mean advantages, trained) of each group of an update."""
  selection = group_selection.select(groups, estimator)
  means = selection.mean_advantages(selection.estimate())
  return means, [mask.tolist() for mask in selection.trained]


def _reasons(groups, estimator, **kwargs):
  return group_selection.select(groups, estimator, **kwargs).reasons


def test_a_faulted_member_is_in_no_mean_and_not_trained():
  # Grpo of 1, 0, 0: mean 1/3, squares add up to 4/9 + 2/9 = 2/3, over 2 the
  # deviation is 0.57735: 0.66667 and -0.33333 over it.
  group = played.group(
    (OK, 1.0, [3]), (FAULT, None, [3]), (OK, 0.0, [3]), (OK, 0.0, [3])
  )
  values, trained = played.of_group(group, advantages.Grpo())
  np.testing.assert_allclose(values, [1.1547, 0, -0.57735, -0.57735], atol=5e-5)
  assert trained.tolist() == [True, False, True, True]
  assert values.dtype == np.float32


def test_trained_members_have_an_advantage_for_each_token():
  group = played.group((OK, 1.0, [3]), (FAULT, None, [3]), (OK, 0.0, [2, 2]))
  selection = group_selection.select([group], advantages.Grpo())
  (found,) = selection.by_group(selection.estimate().advantages)
  won, faulted, lost = found
  assert faulted is None
  assert won is not None
  assert lost is not None
  # Two members: 0.5 over a deviation of 0.70711 is 0.70711.
  np.testing.assert_allclose(won, [0.70711] * 3, atol=5e-5)
  np.testing.assert_allclose(lost, [-0.70711] * 4, atol=5e-5)


def test_a_truncated_member_is_trained():
  group = played.group((OK, 1.0, [3]), (trajectory.Status.TRUNCATED, 0.0, [3]))
  assert group_selection.usable(group).tolist() == [True, True]


@pytest.mark.parametrize(
  "unusable",
  [
    (OK, 0.0, [0]),
    (OK, 0.0, []),
    (OK, None, [3]),
    (OK, float("nan"), [3]),
    (OK, float("inf"), [3]),
    (FAULT, 0.0, [3]),
    (trajectory.Status.STALE, 0.0, [3]),
  ],
)
def test_a_member_without_reward_or_tokens_is_in_no_mean(unusable):
  group = played.group((OK, 1.0, [3]), (OK, 0.0, [1, 2]), unusable)
  values, trained = played.of_group(group, advantages.Rloo())
  assert values.tolist() == [1.0, -1.0, 0.0]
  assert trained.tolist() == [True, True, False]


@pytest.mark.parametrize(
  "members",
  [
    [(OK, 1.0, [3]), (FAULT, None, [3]), (FAULT, None, [0])],
    [(OK, 1.0, [3]), (OK, 0.0, [0])],
    [(FAULT, None, [3]), (FAULT, None, [3])],
    [(OK, 1.0, [3])],
    [],
  ],
)
@pytest.mark.parametrize(
  "estimator", [advantages.Grpo(), WHITENED, token_advantages.TurnReturns()]
)
def test_of_a_group_with_too_few_left_nobody_is_trained(estimator, members):
  group = played.group(*members)
  assert _reasons([group], estimator) == ["singleton"]
  values, trained = played.of_group(group, estimator)
  assert not trained.any()
  assert values.tolist() == [0.0] * len(members)


def test_pass_at_k_needs_k_members():
  group = _group((1.0, 1), (0.0, 1), (0.0, 1))
  assert _reasons([group], advantages.PassAtK(k=3)) == [None]
  assert _reasons([group], advantages.PassAtK(k=4)) == ["singleton"]


@pytest.mark.parametrize(
  "estimator",
  [
    advantages.Grpo(eps=0.0),
    advantages.DrGrpo(),
    advantages.Rloo(),
    advantages.Rloo(others="task"),
    advantages.PassAtK(k=2),
    token_advantages.StepGroups(),
    token_advantages.TurnReturns(),
    WHITENED,
  ],
)
def test_a_group_of_equal_rewards_is_not_trained_and_says_why(estimator):
  groups = [
    _group((1.0, 2), (1.0, 2), task="a"),
    _group((1.0, 2), (0.0, 2), task="b"),
  ]
  assert _reasons(groups, estimator) == ["zero_variance", None]
  means, trained = _update(groups, estimator)
  assert means[0].tolist() == [0.0, 0.0]
  assert trained == [[False, False], [True, True]]
  assert np.isfinite(means[1]).all()


@pytest.mark.parametrize(
  "estimator", [advantages.Reinforce(), token_advantages.ReinforcePlusPlus()]
)
def test_who_compares_no_members_trains_equal_rewards_and_single_ones(
  estimator,
):
  groups = [_group((1.0, 2), (1.0, 2)), _group((0.0, 1))]
  assert _reasons(groups, estimator) == [None, None]
  faults = played.group((FAULT, None, [3]))
  assert _reasons([faults], estimator) == ["singleton"]


def test_with_penalties_equal_rewards_have_variance():
  groups = [_group((1.0, 1), (1.0, 2))]
  assert _reasons(groups, advantages.Rloo(), penalised=True) == [None]
  selection = group_selection.select(groups, advantages.Rloo(), penalised=True)
  found = selection.estimate(
    penalties=[np.array([0.5], "f4"), np.array([0.25, 0.5], "f4")],
  )
  # 1 - 0.5 and 1 - 0.75.
  assert [own.tolist() for own in found.advantages] == [[0.25], [-0.25, -0.25]]


def test_penalties_and_values_are_those_of_the_members_that_are_trained():
  groups = [
    played.group((FAULT, None, [9]), (OK, 1.0, [1, 1])),
    _group((3.0, 1), (5.0, 1)),
  ]
  estimator = token_advantages.Gae(lambda_=1.0)
  selection = group_selection.select(groups, estimator)
  assert [len(t.turns) for t in selection.members] == [2, 1, 1]
  found = selection.estimate(
    penalties=[np.array(x, "f4") for x in ([0.5, 0.25], [0.0], [1.0])],
    values=[np.array(x, "f4") for x in ([0.25, 0.5], [1.0], [1.0])],
  )
  assert found.returns is not None
  got = [own.tolist() for own in found.advantages]
  assert got == [[0.0, 0.25], [2.0], [3.0]]
  targets = [own.tolist() for own in found.returns]
  assert targets == [[0.25, 0.75], [3.0], [4.0]]
  dtypes = {own.dtype for own in found.advantages + found.returns}
  assert dtypes == {np.dtype(np.float32)}


def test_advantages_for_other_members_than_were_asked_for_are_refused():
  @dataclasses.dataclass(frozen=True)
  class Pair(advantages.Estimator):
    def __call__(self, members):
      kept = members[:2]
      return advantages.Estimate([np.zeros(len(one.turns)) for one in kept])

  group = _group((1.0, 2), (0.0, 3), (0.0, 4))
  selection = group_selection.select([group], Pair())
  told = r"advantage=pair returned .* \[2, 3\] for members of \[2, 3, 4\] tok"
  with pytest.raises(ValueError, match=told):
    selection.estimate()


def test_scores_for_too_few_members_are_refused():
  groups = [_group((1.0, 1), (0.0, 1))]
  selection = group_selection.select(groups, advantages.Rloo())
  with pytest.raises(ValueError, match="shorter"):
    selection.estimate(penalties=[np.zeros(1, "f4")])


def test_what_an_environment_gave_a_turn_is_credited_to_it():
  plain = played.group((OK, 1.0, [1, 2]), (OK, 1.0, [2, 1]))
  group = played.group(
    (OK, 1.0, [1, 2]), (OK, 1.0, [2, 1]), earned=[[1.0, 0.0], [0.0, 1.0]]
  )
  estimator = token_advantages.TurnReturns()
  assert _reasons([plain, group], estimator) == ["zero_variance", None]
  found = group_selection.select([group], estimator).estimate()
  # Both have 1 from the start on; in the second turn the second earns it.
  assert [own.tolist() for own in found.advantages] == [
    [0.0, -1.0, -1.0],
    [0.0, 0.0, 1.0],
  ]


def test_turns_with_the_same_context_are_alike():
  group = played.group((OK, 1.0, [1, 1]), (OK, 0.0, [1, 1]))
  estimator = token_advantages.StepGroups(
    normalise="mean", weight=10.0, discount=1.0
  )
  found = group_selection.select([group], estimator).estimate()
  assert [own.tolist() for own in found.advantages] == [[5.5] * 2, [-5.5] * 2]


@pytest.mark.parametrize("reward", [0.3, 10.1, 1000.1])
def test_of_turns_that_earned_nothing_none_is_better_by_rounding(reward):
  # No float32 is 0.3 or a third of it: the rest of the reward was not 0.
  both = [reward, reward / 3]
  group = played.group(
    *[(OK, own, [1, 1]) for own in both], earned=[[own, 0.0] for own in both]
  )
  found = group_selection.select([group], token_advantages.StepGroups())
  # Two that differ are 1 / sqrt(2) = 0.70711 deviations from their mean, as
  # episodes and as turns 0; turns 1 are equal.
  want = np.array([[1.41421, 0.70711], [-1.41421, -0.70711]])
  got = found.estimate().advantages
  np.testing.assert_allclose(got, want, atol=3e-5)


def test_turns_are_alike_by_history_only_after_the_same_answers():
  # Both see the same before turn 1, but have answered 0 and 1 before it.
  group = played.group((OK, 1.0, [1, 1]), (OK, 0.0, [1, 1]))
  group.trajectories[1].turns[0].tokens[:] = 1
  found = {}
  for alike in ("observation", "history"):
    estimator = token_advantages.StepGroups(
      alike=alike, normalise="mean", discount=1.0
    )
    own = group_selection.select([group], estimator).estimate().advantages
    found[alike] = [values.tolist() for values in own]
  # Episodes +- 1/2; at the start +- 1/2 more; at turn 1 only where alike.
  assert found["observation"] == [[1.0, 1.0], [-1.0, -1.0]]
  assert found["history"] == [[1.0, 0.5], [-1.0, -0.5]]


def test_turns_that_saw_the_same_after_another_context_have_no_history_alike():
  group = played.group((OK, 1.0, [1, 1]), (OK, 0.0, [1, 1]))
  group.trajectories[1].turns[0].context[:] = 7
  estimator = token_advantages.StepGroups(
    alike="history", normalise="mean", discount=1.0
  )
  found = group_selection.select([group], estimator).estimate()
  # Nothing is alike from the start on: episodes alone.
  assert [own.tolist() for own in found.advantages] == [[0.5] * 2, [-0.5] * 2]


def test_whitening_leaves_out_faults_and_groups_that_are_not_trained():
  whole = [_group((1.0, 1), (0.0, 3)), _group((4.0, 2), (0.0, 2))]
  worse = [
    whole[0],
    played.group((OK, 9.0, [4]), (FAULT, None, [3])),
    played.group((FAULT, None, [5]), (OK, 4.0, [2]), (OK, 0.0, [2])),
    _group((7.0, 2), (7.0, 2)),
  ]
  want, _ = _update(whole, WHITENED)
  got, trained = _update(worse, WHITENED)
  assert got[0].tolist() == want[0].tolist()
  assert got[2].tolist() == [0.0, *want[1].tolist()]
  assert not got[1].any()
  assert not got[3].any()
  assert trained == [[True] * 2, [False] * 2, [False, True, True], [False] * 2]


def test_groups_kept_without_variance_are_not_whitened():
  whole = [_group((1.0, 1), (0.0, 3)), _group((4.0, 2), (0.0, 2))]
  flat = _group((7.0, 2), (7.0, 2))
  want = group_selection.select(whole, WHITENED).estimate().advantages
  found = group_selection.select(
    [flat, *whole], WHITENED, keep_zero_variance=True
  ).estimate()
  # The tokens of the others have a mean, which no flat group may get minus of.
  assert [own.tolist() for own in found.advantages[:2]] == [[0.0] * 2] * 2
  for own, wanted in zip(found.advantages[2:], want, strict=True):
    assert own.tolist() == wanted.tolist()


@pytest.mark.parametrize("keep", [False, True])
def test_equal_rewards_of_other_turns_are_whitened_with_the_rest(keep):
  groups = [
    played.group(
      (OK, 1.0, [2, 2]), (OK, 1.0, [2, 2]), earned=[[1.0, 0.0], [0.0, 1.0]]
    ),
    played.group(
      (OK, 1.0, [2, 2]), (OK, 0.0, [2, 2]), earned=[[0.0, 1.0], [0.0, 0.0]]
    ),
  ]
  selection = group_selection.select(groups, WHITENED, keep_zero_variance=keep)
  assert selection.reasons == [None, None]
  # Less the group's mean: 0, 0, -1, -1 | 0 | 0.5 | -0.5, of 4 tokens each. The
  # mean is -2/16, the mean square 4/16 and so the variance 15/64.
  raw = np.array([[0, 0, -1, -1], [0] * 4, [0.5] * 4, [-0.5] * 4])
  want = (raw + 1 / 8) / np.sqrt(15 / 64)
  np.testing.assert_allclose(selection.estimate().advantages, want, atol=1e-6)


@dataclasses.dataclass(frozen=True)
class _Indifferent(token_advantages.TurnReturns):
  """One of a user's own that asks for equal rewards, whatever the turns."""

  zero_variance = advantages.Estimator.zero_variance


def test_of_any_estimator_groups_kept_without_variance_have_zero():
  group = played.group(
    (OK, 1.0, [1, 1]), (OK, 1.0, [1, 1]), earned=[[1.0, 0.0], [0.0, 1.0]]
  )
  found = group_selection.select(
    [group], _Indifferent(), keep_zero_variance=True
  ).estimate()
  assert [own.tolist() for own in found.advantages] == [[0.0] * 2] * 2


def test_whitening_over_an_update_has_mean_zero_over_all_its_groups():
  groups = [_group((1.0, 1), (0.0, 3)), _group((4.0, 2), (0.0, 2))]
  estimator = token_advantages.ReinforcePlusPlus()
  found = group_selection.select(groups, estimator).estimate()
  values = np.concatenate(found.advantages)
  assert values.mean() == pytest.approx(0, abs=1e-7)
  assert values.std() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
  "estimator",
  [advantages.Grpo(), WHITENED, token_advantages.Gae(whitened=True)],
)
@pytest.mark.parametrize("groups", [[], [played.group((FAULT, None, [3]))]])
def test_an_update_of_nothing_has_no_advantage(groups, estimator):
  means, trained = _update(groups, estimator)
  assert [own.tolist() for own in means] == [[0.0]] * len(groups)
  assert trained == [[False]] * len(groups)


@pytest.mark.parametrize(
  "estimator",
  [
    advantages.Grpo(),
    advantages.Reinforce(baseline=0.25),
    token_advantages.StepGroups(),
    token_advantages.TurnReturns(),
  ],
)
def test_of_scope_group_each_group_is_on_its_own(estimator):
  groups = [_group((1.0, 3), (0.0, 3), (0.0, 1)), _group((2.0, 1), (5.0, 1))]
  assert estimator.scope == "group"
  means, trained = _update(groups, estimator)
  for i, group in enumerate(groups):
    alone, used = played.of_group(group, estimator)
    assert means[i].tolist() == alone.tolist()
    assert trained[i] == used.tolist()


def test_leave_one_out_per_task_compares_groups_of_the_same_task():
  groups = [
    _group((1.0, 1), (1.0, 2), task="a"),
    _group((8.0, 1), (2.0, 1), task="b"),
    _group((1.0, 1), (0.0, 3), task="a"),
  ]
  means, trained = _update(groups, advantages.Rloo(others="task"))
  # Of 1, 1, 1, 0: less 2/3 of the others, or 1; of 8 and 2 as ever.
  np.testing.assert_allclose(means[0], [1 / 3, 1 / 3], rtol=1e-6)
  assert means[1].tolist() == [6.0, -6.0]
  np.testing.assert_allclose(means[2], [1 / 3, -1], rtol=1e-6)
  assert trained == [[True, True]] * 3
  # Each on its own, the first would teach nothing.
  assert _reasons(groups, advantages.Rloo()) == ["zero_variance", None, None]


def test_per_task_a_member_that_is_alone_in_its_group_is_no_singleton():
  groups = [
    played.group((OK, 1.0, [1]), (FAULT, None, [1]), task="a"),
    played.group((FAULT, None, [1]), (OK, 0.0, [1]), task="a"),
    played.group((OK, 1.0, [1]), (FAULT, None, [1]), task="b"),
  ]
  assert _reasons(groups, advantages.Rloo()) == ["singleton"] * 3
  estimator = advantages.Rloo(others="task")
  assert _reasons(groups, estimator) == [None, None, "singleton"]
  means, _ = _update(groups, estimator)
  assert [own.tolist() for own in means] == [[1, 0], [0, -1], [0, 0]]


def test_the_mean_of_a_member_is_over_its_tokens():
  group = played.group((OK, 1.0, [1, 1]), (OK, 0.0, [1]))
  estimator = token_advantages.StepGroups(
    normalise="mean", weight=1.0, discount=0.5
  )
  values, _ = played.of_group(group, estimator)
  # Episodes +- 1/2; at the start 1/2 and 0, so +- 1/4; nobody else at turn 1.
  assert values.tolist() == [(0.75 + 0.5) / 2, -0.75]
