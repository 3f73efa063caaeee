"""Mixtures: the source and the reward of every task."""

import asyncio
import dataclasses
import pickle

import pytest

from envs import base, mixture
from envs.rewards import rewards


@dataclasses.dataclass(frozen=True)
class Echo:
  """A source with its own words; an episode is one answer."""

  name: str
  words: tuple[str, ...] = ("go",)

  def task(self, index, split):
    return base.Task(f"{self.name}/{split}/{index}", index, split, index)

  def __call__(self, task):
    return _Once(self)

  def oracle(self, task, messages):
    return f"{self.name} knows"

  def explore(self, task, messages, seed):
    return f"{self.name} tries {seed}"


@dataclasses.dataclass(frozen=True)
class _Once:
  source: Echo

  async def start(self):
    return [base.Message("user", self.source.name)]

  async def step(self, answer):
    return base.Step([base.Message("user", "end")], 1.0, True)

  async def close(self):
    pass


@dataclasses.dataclass(frozen=True)
class Constant:
  """A reward that is always the same."""

  value: float
  stateless: bool = True

  async def __call__(self, task, transcripts):
    return [base.Grade(self.value, {}) for _ in transcripts]


def _mixture(**weights):
  parts = [mixture.Part(Echo(name), w) for name, w in weights.items()]
  return mixture.Mixture(tuple(parts))


def _grade(reward, task):
  transcripts = [base.Transcript([], [])]
  return asyncio.run(reward(task, transcripts))[0].value


def test_it_is_a_source_that_can_be_sent_to_another_process():
  made = _mixture(a=1.0, b=2.0)
  assert isinstance(made, base.Source)
  assert pickle.loads(pickle.dumps(made)) == made
  assert hash(made) == hash(_mixture(a=1.0, b=2.0))


def test_words_are_a_union_in_the_order_of_the_parts():
  one, two = Echo("a", ("go", "left")), Echo("b", ("stop", "go", "up"))
  made = mixture.Mixture((mixture.Part(one), mixture.Part(two)))
  assert made.words == ("go", "left", "stop", "up")
  assert made.sources == (one, two)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_tasks_keep_the_ids_and_the_order_of_their_source(split):
  made = _mixture(a=1.0, b=3.0)
  tasks = [made.task(i, split) for i in range(40)]
  # A quarter of 40 and three quarters, each from the first on.
  for name, count in (("a", 10), ("b", 30)):
    own = [task for task in tasks if task.source == name]
    assert own == [Echo(name).task(i, split) for i in range(count)]


@pytest.mark.parametrize(
  "weights",
  [
    {"a": 1.0},
    {"a": 1.0, "b": 1.0},
    {"a": 0.3, "b": 0.7},
    {"a": 5, "b": 1},
    {"a": 1.0, "b": 2.0, "c": 4.0},
  ],
)
def test_every_beginning_holds_the_proportions_to_within_one_task(weights):
  made = _mixture(**weights)
  counts = dict.fromkeys(weights, 0)
  for i in range(300):
    counts[made.task(i, "eval").source] += 1
    for name, weight in weights.items():
      exact = (i + 1) * weight / sum(weights.values())
      assert abs(counts[name] - exact) <= 1


def test_a_task_far_out_is_found_as_fast_as_the_first():
  made, far = _mixture(a=1.0, b=2.0), 10**9
  tasks = [made.task(3 * far + i, "train") for i in range(3)]
  # The order is b a b over and over, and far periods lie before.
  expected = [("b", 2 * far), ("a", far), ("b", 2 * far + 1)]
  assert [(task.source, task.index) for task in tasks] == expected


def test_environment_oracle_and_exploration_are_the_sources(play):
  made = _mixture(a=1.0, b=1.0)
  task = Echo("b").task(7, "train")
  said = play(made, task, made.oracle)
  assert [m.content for m in said.messages] == ["b", "b knows", "end"]
  assert made.explore(task, [], 3) == "b tries 3"


def test_a_task_of_another_source_is_refused():
  with pytest.raises(
    ValueError, match=r"c/train/0 must belong to one of \['a', 'b'\]"
  ):
    _mixture(a=1.0, b=1.0)(Echo("c").task(0, "train"))


@pytest.mark.parametrize(
  ("names", "message"),
  [
    ([], "at least one source"),
    (["a", "b", "a"], r"\['a'\] are in the mixture more than once"),
    (["a/b"], "contain a slash"),
    ([""], "must not be empty"),
  ],
)
def test_sources_that_ids_cannot_tell_apart_are_refused(names, message):
  with pytest.raises(ValueError, match=message):
    mixture.Mixture(tuple(mixture.Part(Echo(name)) for name in names))


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_no_share_is_refused(weight):
  with pytest.raises(ValueError, match="above 0"):
    mixture.Part(Echo("a"), weight)


def test_each_task_is_graded_by_the_rule_of_its_source():
  reward = mixture.ByTask(
    (mixture.RewardRule("a", Constant(0.25)),), Constant(2.0)
  )
  assert isinstance(reward, base.Reward)
  assert _grade(reward, Echo("a").task(0, "train")) == 0.25
  assert _grade(reward, Echo("b").task(0, "train")) == 2.0


def test_a_source_without_a_rule_needs_a_default():
  reward = mixture.ByTask((mixture.RewardRule("a", rewards.Outcome()),))
  with pytest.raises(ValueError, match="no reward grades task b/eval/0"):
    reward.reward_of(Echo("b").task(0, "eval"))


@pytest.mark.parametrize(
  ("rule", "default", "expected"),
  [(True, True, True), (False, True, False), (True, False, False)],
)
def test_rewards_are_stateless_when_all_of_them_are(rule, default, expected):
  rules = (mixture.RewardRule("a", Constant(0.0, rule)),)
  reward = mixture.ByTask(rules, Constant(0.0, default))
  assert reward.stateless is expected


@pytest.mark.parametrize(("count", "match"), [(0, "grade nothing"), (2, "two")])
def test_rules_that_grade_nothing_or_twice_are_refused(count, match):
  with pytest.raises(ValueError, match=match):
    mixture.ByTask((mixture.RewardRule("a", Constant(0.0)),) * count)
