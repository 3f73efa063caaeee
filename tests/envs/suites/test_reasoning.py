import contextlib
import io
import json
import os
import pickle
import random
import re
import subprocess
import sys

import pytest

from envs import base, mixture
from envs.suites import reasoning

# The message of a run without the package is tested with or without it.
try:
  from reasoning_gym import factory  # pyright: ignore[reportMissingImports]
except ImportError:
  DATASETS = ()
  needs_package = pytest.mark.skip(reason="needs reasoning-gym")
else:
  DATASETS = tuple(sorted({*factory.DATASETS} - {"composite"}))
  needs_package = pytest.mark.filterwarnings("ignore")

# They have no answer of their own: any that keeps to the rules is right.
NO_ANSWER = {
  "boxnet",
  "graph_color",
  "propositional_logic",
  "rubiks_cube",
  "rush_hour",
}
# Sympy leaves some integrals as they are, and repeats the question.
SOME_ANSWERS = {"intermediate_integration"}

JUNK = (
  "", " ", "\n", "0", "-1", "[]", "{}", "()", "[[]]", "I don't know", "None",
  "maybe", "-", "nan", "NaN", "inf", "nanj", "[NaN]", "((((", "1/0", "9" * 5000,
  "9**9**9", "1e999999999", "[9**9**9]", "x" * 30_000,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _hash_seed(monkeypatch):
  monkeypatch.setenv("PYTHONHASHSEED", "0")


def source(dataset="chain_sum", **fields) -> reasoning.ReasoningGym:
  return reasoning.ReasoningGym(dataset=dataset, **fields)


def entry(dataset: str, seed: int = 7):
  return reasoning._entry(source(dataset), seed)


def reward(dataset: str, answer: str, seed: int = 7) -> float:
  return reasoning._score(source(dataset), answer, entry(dataset, seed))[0]


def test_a_run_without_the_package_is_told_which_extra_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, "reasoning_gym", None)
  with pytest.raises(ValueError, match=r"pip install 'twinmesh\[reasoning\]'"):
    source()


@needs_package
def test_a_question_is_asked_and_its_answer_pays(play):
  task = source().task(3, "train")
  transcript = play(source(), task, source().oracle)
  asked, answer = transcript.messages
  terms = asked.content.split("=")[0].split(":")[-1]
  numbers = re.findall(r"[-+]? ?\d+", terms)
  total = sum(int(number.replace(" ", "")) for number in numbers)
  assert answer.content == str(total)
  assert transcript.step_rewards == [1.0]
  assert task.id == "chain_sum/train/3"


@needs_package
@pytest.mark.parametrize(
  ("text", "paid"),
  [
    ("{}", 1.0),
    (" {}\n", 1.0),
    ("<answer>{}</answer>", 1.0),
    ("<think>Hm, 1?</think> So:\n<answer> {} </answer>", 1.0),
    ("<answer>1000000</answer> no, <answer>{}</answer>", 1.0),
    ("<answer>{}</answer> no, <answer>1000000</answer>", 0.0),
    ("The answer is {}.", 0.0),
    ("<answer></answer>{}", 0.0),
  ],
)
def test_the_last_tags_hold_the_answer_or_else_all_of_it(play, text, paid):
  task = source().task(0, "train")
  right = source().oracle(task, [])
  transcript = play(source(), task, lambda *_: text.format(right))
  assert transcript.step_rewards == [paid]


@needs_package
def test_a_system_prompt_asks_for_tags_and_the_oracle_gives_them(play):
  tagged = source(system_prompt="default")
  task = tagged.task(0, "train")
  transcript = play(tagged, task, tagged.oracle)
  system, _, answer = transcript.messages
  assert "<answer>" in system.content
  assert answer.content.startswith("<answer>")
  assert transcript.step_rewards == [1.0]


@needs_package
@pytest.mark.slow
@pytest.mark.parametrize("dataset", DATASETS)
def test_junk_earns_nothing(dataset):
  chosen = source(dataset)
  for seed in range(6):
    item = reasoning._entry(chosen, seed)
    answers = [*JUNK, item["question"]]
    with contextlib.redirect_stdout(io.StringIO()):
      paid = {
        answer[:40]: item["answer"]
        for answer in answers
        if reasoning._score(chosen, answer, item)[0] >= 1
        and not _is_right(answer, item["answer"])
      }
    assert not paid


def _is_right(answer: str, right: str | None) -> bool:
  """Returns whether a junk answer happens to be the right one."""
  with contextlib.suppress(ValueError, TypeError):
    return float(answer) == float(right or "nan")
  return answer.strip() == right


@needs_package
@pytest.mark.slow
@pytest.mark.parametrize("dataset", DATASETS)
def test_the_answer_of_a_dataset_has_its_full_score(dataset):
  chosen = source(dataset)
  items = [reasoning._entry(chosen, seed) for seed in range(6)]
  right = [
    item["answer"] is not None
    and reasoning._score(chosen, item["answer"], item)[0] == 1
    for item in items
  ]
  if dataset in NO_ANSWER:
    assert not any(right)
  else:
    assert all(right) or dataset in SOME_ANSWERS


@needs_package
@pytest.mark.slow
def test_items_are_the_same_in_another_process():
  script = """
import json, random, zlib
from envs.suites import reasoning
random.seed({seed})
made = {{
  dataset: [
    zlib.crc32(repr((item["question"], item["answer"])).encode())
    for seed in (5, 9)
    for item in [
      reasoning._entry(reasoning.ReasoningGym(dataset=dataset), seed)
    ]
  ]
  for dataset in {datasets}
}}
print()  # after the dots that one of them prints
print(json.dumps(made))
"""
  free = sorted({*DATASETS} - reasoning._HASHED)
  first, again, other = (
    json.loads(
      subprocess.run(
        [
          *(sys.executable, "-W", "ignore", "-c"),
          script.format(seed=seed, datasets=datasets),
        ],
        env=os.environ | {"PYTHONHASHSEED": str(seed // 2)},
        capture_output=True,
        text=True,
        check=True,
      ).stdout.splitlines()[-1]
    )
    for seed, datasets in ((0, DATASETS), (1, DATASETS), (2, free))
  )
  assert first == again
  assert {dataset: first[dataset] for dataset in free} == other


@needs_package
@pytest.mark.parametrize(
  ("dataset", "attack"),
  [
    ("string_insertion", "[open({!r}, 'w')]"),
    ("n_queens", "[[open({!r}, 'w')]]"),
    ("spiral_matrix", "[x for x in [open({!r}, 'w')]]"),
    ("binary_matrix", "[[open({!r}, 'w')]]"),
    ("countdown", "open({!r}, 'w')"),
    ("puzzle24", "open({!r}, 'w')"),
    ("simple_integration", "open({!r}, 'w')"),
    ("polynomial_multiplication", "x + open({!r}, 'w')"),
  ],
)
def test_an_answer_is_never_run_as_a_program(tmp_path, dataset, attack):
  file = tmp_path / "file"
  score, readable = reasoning._score(
    source(dataset), attack.format(str(file)), entry(dataset)
  )
  assert (score, readable) == (0.0, False)
  assert not file.exists()
  # The package itself would have run it.
  with contextlib.suppress(Exception):
    reasoning._dataset(source(dataset)).score_answer(
      attack.format(str(file)), entry(dataset)
    )
  assert file.exists()


@needs_package
@pytest.mark.parametrize(
  ("dataset", "answer"),
  [
    # Two that hold the interpreter for ever, with no call in them.
    ("countdown", "9**9**9"),
    ("simple_integration", "x**9**9**9"),
    ("simple_integration", "(((x+1)**12)**12)**12"),
    ("simple_integration", "Integral(x, x)"),
    ("simple_integration", "9999999999!"),
    ("polynomial_multiplication", "x.__class__"),
    ("n_queens", "[0 for a in '12' for b in '34']"),
    ("coin_flip", "1e999999999"),
    ("rush_hour", "A+999999999"),
    ("number_sorting", "[NaN, NaN, NaN]"),
    ("complex_arithmetic", "nan+nanj"),
    # Numbers that countdown's count of numbers used would miss.
    ("countdown", "0x11"),
    ("countdown", "1e1"),
  ],
)
def test_an_answer_that_is_no_answer_is_not_read(dataset, answer):
  assert not reasoning._is_safe(dataset, answer)


@needs_package
@pytest.mark.parametrize(
  ("dataset", "answer"),
  [
    ("simple_integration", "2*X**3/3 - sin(X)**2 + exp(-X) + C"),
    ("polynomial_multiplication", "-6*x**4 + 12*x - 1"),
    ("countdown", "(12 - 3)*4 + 7/1"),
    ("n_queens", "_ Q _ _\n_ _ _ Q"),
    ("spiral_matrix", "1 2 3 4"),
    ("coin_flip", "5/16"),
    ("rush_hour", "F+1 K+1 M-1 C+3 H+2"),
    ("number_sorting", "['-1.5', '3.0']"),
  ],
)
def test_what_an_answer_looks_like_is_read(dataset, answer):
  assert reasoning._is_safe(dataset, answer)


@needs_package
def test_scores_that_are_full_too_easily_are_asked_again():
  # 0 is the beginning of 0.125, which earns all of a partial score.
  items = (entry("coin_flip", seed) for seed in range(99))
  item = next(item for item in items if item["answer"] == "0.125")
  scores = [
    reasoning._score(source("coin_flip"), answer, item)[0]
    for answer in ("0.125", "1/8", "0", "0.1")
  ]
  assert scores[:2] == [1, 1]
  assert max(scores[2:]) == 0
  # Any text that is not empty is true in Python.
  right = entry("game_of_life_halting")["answer"]
  wrong = {"True": "False", "False": "True"}[str(right)]
  assert reward("game_of_life_halting", str(right)) == 1
  assert reward("game_of_life_halting", wrong) == 0
  # 6 * 4 = 24 is right for other numbers.
  assert reward("puzzle24", entry("puzzle24")["answer"]) == 1
  assert reward("puzzle24", "6*4*1*1") == 0


@needs_package
@pytest.mark.parametrize(
  "dataset",
  [
    "advanced_geometry",
    "fraction_simplification",
    "gsm_symbolic",
    "kakurasu",
    "knights_knaves",
    "letter_jumble",
    "quantum_lock",
    "sokoban",
    "survo",
    "time_intervals",
    "word_sorting",
  ],
)
def test_the_right_answer_among_others_earns_nothing(dataset):
  right = entry(dataset)["answer"]
  assert reward(dataset, right) == 1
  for text in (f"not {right}", f"{right} 7 8 9", f"7, 8, 9, {right}"):
    assert reward(dataset, text) < 1


@needs_package
def test_a_walk_that_strays_into_a_solution_earns_nothing():
  right = entry("sokoban")["answer"]
  assert reward("sokoban", "UD" * 3 * len(right) + right) == 0


@needs_package
def test_a_score_in_part_is_a_metric_and_no_reward(play_all):
  chosen = source("needle_haystack", label="words")
  spelled = source("spell_backward")
  task = spelled.task(0, "train")
  word = spelled.oracle(task, [])
  step = play_steps(spelled, task, word[:-1] + "#")
  assert 0 < step.metrics["score"] < 1
  assert step.reward == 0
  assert chosen.task(0, "eval").id == "words/eval/0"


def play_steps(chosen, task, answer) -> base.Step:
  import asyncio

  async def run():
    question = chosen(task)
    await question.start()
    return await question.step(base.Message("assistant", answer))

  return asyncio.run(run())


@needs_package
def test_what_a_scorer_cannot_read_is_counted_and_pays_nothing():
  chosen = source("countdown")
  step = play_steps(chosen, chosen.task(0, "train"), "__import__('os')")
  assert (step.reward, step.done) == (0.0, True)
  assert step.metrics == {"score": 0.0, "unreadable": 1.0}


@needs_package
@pytest.mark.parametrize("dataset", ["chain_sum", "arc_1d", "list_functions"])
def test_no_question_of_evaluation_is_one_of_training(dataset):
  chosen = source(dataset)
  asked = {
    split: {
      reasoning._entry(chosen, chosen.task(i, split).seed)["question"]
      for i in range(150)
    }
    for split in ("train", "eval")
  }
  assert not asked["train"] & asked["eval"]
  assert min(map(len, asked.values())) > 100


@needs_package
@pytest.mark.parametrize("dataset", ["pool_matrix", "list_functions", "codeio"])
def test_an_item_follows_from_its_seed_alone(dataset):
  items = []
  for state in (1, 2):
    random.seed(state)
    before = random.getstate()
    reasoning._entry.cache_clear()
    entry(dataset, 8 + state)
    items.append(entry(dataset))
    assert random.getstate() == before
  assert items[0]["question"] == items[1]["question"]
  assert items[0]["answer"] == items[1]["answer"]


@needs_package
def test_too_few_questions_are_an_error_and_no_endless_search():
  # How many primes there are between 1 and 1.
  only = source("count_primes", options=(("min_n", 1), ("max_n", 1)))
  with pytest.raises(ValueError, match="too few different"):
    [only.task(0, split) for split in ("train", "eval")]


@needs_package
def test_levels_make_questions_longer_and_options_win():
  lengths = [
    sum(
      len(reasoning._entry(source(level=level), seed)["question"])
      for seed in range(30)
    )
    for level in (0, 3)
  ]
  assert lengths[1] > lengths[0]
  chosen = source(level=3, options=(("min_digits", 1), ("max_digits", 1)))
  text = reasoning._entry(chosen, 5)["question"].split(":")[-1]
  assert not re.search(r"\d\d", text)


@needs_package
def test_a_list_is_given_as_words():
  chosen = source("basic_arithmetic", options=(("operators", "*"),))
  for seed in range(20):
    text = reasoning._entry(chosen, seed)["question"]
    assert "+" not in text


@needs_package
def test_several_datasets_are_a_mixture(play_all):
  both = mixture.Mixture(
    (
      mixture.Part(source(), weight=2),
      mixture.Part(source(level=2, label="long_sums")),
    )
  )
  tasks = [both.task(i, "train") for i in range(6)]
  assert {t.source for t in tasks} == {"chain_sum", "long_sums"}
  played = play_all(both, tasks, both.oracle)
  assert [t.step_rewards for t in played] == [[1.0]] * 6


@needs_package
def test_an_explorer_answers_another_question(play_all):
  tasks = [source().task(i, "train") for i in range(20)]
  played = play_all(
    source(), tasks, lambda task, seen: source().explore(task, seen, task.seed)
  )
  assert sum(t.step_rewards[0] for t in played) < 2


@needs_package
def test_a_dataset_without_an_answer_has_no_oracle():
  chosen = source("rush_hour")
  with pytest.raises(ValueError, match="warm_start=none"):
    chosen.oracle(chosen.task(0, "train"), [])


@needs_package
@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"dataset": "chain_sums"}, "use chain_sum"),
    ({"dataset": "composite"}, "mixture.Mixture"),
    ({"dataset": "quantum_lock", "level": 99}, "levels 0 to"),
    ({"dataset": "arc_1d", "level": -1}, "level=-1"),
    ({"options": (("terms", 3),)}, "min_terms"),
    ({"options": (("seed", 3),)}, "has no 'seed'"),
    ({"options": (("min_terms", 0),)}, "do not fit chain_sum"),
    ({"options": (("min_terms", "many"),)}, "do not fit chain_sum"),
    ({"system_prompt": "loud"}, "default"),
  ],
)
def test_settings_that_cannot_work_are_refused(fields, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    source(**({"dataset": "chain_sum"} | fields))


@needs_package
def test_items_that_depend_on_the_process_need_its_hash_seed(monkeypatch):
  monkeypatch.delenv("PYTHONHASHSEED")
  with pytest.raises(ValueError, match="PYTHONHASHSEED=0"):
    source("codeio")


@needs_package
def test_a_source_is_a_setting():
  chosen = source(level=1, options=(("min_terms", 3),))
  assert pickle.loads(pickle.dumps(chosen)) == chosen
  assert isinstance(chosen, base.Demonstrates)
  assert hash(chosen) == hash(pickle.loads(pickle.dumps(chosen)))
