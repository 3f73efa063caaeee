"""Samples of trajectories on disk can be read by people and by programs."""

import json

import numpy as np
import pytest

from launch.run import rollout_samples
from models.chat import byte_chat, word_chat
from rl.data import trajectory
from rl.train import logprob_gap, trainer

CHAT = word_chat.WordChat(("go", "on", "yes"))
BYTES = byte_chat.ByteChat()
GO, ON, YES = 3, 4, 5
UNTRAINED = [None, None]


def _turn(context, tokens):
  return trajectory.Turn(
    context=np.asarray(context, np.int32),
    tokens=np.asarray(tokens, np.int32),
    logprobs=np.full(len(tokens), -0.1, np.float32),
    versions=np.full(len(tokens), 2, np.int32),
    stop="stop",
  )


def _group(group_id, size=2):
  members = [
    trajectory.Trajectory(
      task_id=f"game/train/{group_id}",
      group_id=group_id,
      index=index,
      turns=[
        _turn([GO, word_chat.AGENT], [YES, word_chat.END]),
        _turn([ON, word_chat.AGENT], [YES]),
      ],
      status=trajectory.Status.COMPLETED,
      reward=1.0,
    )
    for index in range(size)
  ]
  return trajectory.Group(
    group_id=group_id,
    trajectories=members,
    admitted=2,
  )


def test_a_file_has_a_line_for_each_member_with_its_advantage(tmp_path):
  values = np.array([[0.5, -0.5], [0.25, 0.0]], np.float32)
  groups = [_group(3), _group(7)]
  path = rollout_samples.write(
    tmp_path, 12, groups, list(values), [UNTRAINED, UNTRAINED], CHAT
  )
  assert path == tmp_path / "trajectories" / "round_000012.jsonl"
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  assert [(x["group_id"], x["index"], x["advantage"]) for x in lines] == [
    (3, 0, 0.5),
    (3, 1, -0.5),
    (7, 0, 0.25),
    (7, 1, 0.0),
  ]


def test_a_trained_member_has_the_numbers_of_each_token(tmp_path):
  # Its turns have 2 tokens and 1.
  advantages = np.array([0.5, 0.25, -1.0], np.float32)
  old = np.array([-0.5, -0.25, np.nan], np.float32)
  tokens = [trainer.TokenUse(advantages, old), None]
  means = [np.array([-1 / 12, 0.0], np.float32)]
  path = rollout_samples.write(tmp_path, 1, [_group(0)], means, [tokens], CHAT)
  trained, other = map(json.loads, path.read_text().splitlines())
  assert [x["advantages"] for x in trained["turns"]] == [[0.5, 0.25], [-1.0]]
  found = [x["old_logprobs"] for x in trained["turns"]]
  assert found == [[-0.5, -0.25], [None]]
  assert all("advantages" not in turn for turn in other["turns"])


def test_tokens_that_were_not_scored_again_have_no_old_log_probability(
  tmp_path,
):
  use = trainer.TokenUse(np.zeros(3, np.float32))
  means = [np.zeros(2, np.float32)]
  path = rollout_samples.write(
    tmp_path, 1, [_group(0)], means, [[use, use]], CHAT
  )
  (line, _) = map(json.loads, path.read_text().splitlines())
  assert all("old_logprobs" not in turn for turn in line["turns"])


def test_every_id_stands_beside_its_word():
  data = rollout_samples.readable(_group(0).trajectories[0], CHAT)
  first, second = data["turns"]
  assert first["context_words"] == ["go", "<agent>"]
  assert first["words"] == ["yes", "<end>"]
  assert second["context_words"] == ["on", "<agent>"]
  assert second["words"] == ["yes"]


@pytest.mark.parametrize(("chat", "gap"), [(CHAT, " "), (BYTES, "")])
def test_the_text_between_two_words_stands_beside_them(chat, gap):
  data = rollout_samples.readable(_group(0).trajectories[0], chat)
  assert data["gap"] == gap


def test_a_line_makes_the_trajectory_again(tmp_path):
  values = [np.zeros(2, np.float32)]
  path = rollout_samples.write(
    tmp_path, 0, [_group(0)], values, [UNTRAINED], CHAT
  )
  line = json.loads(path.read_text().splitlines()[0])
  again = trajectory.trajectory_from_json(line)
  member = _group(0).trajectories[0]
  assert again.ids.tolist() == member.ids.tolist()
  assert trajectory.trajectory_to_json(again) == (
    trajectory.trajectory_to_json(member)
  )


def test_a_round_that_is_repeated_replaces_its_file(tmp_path):
  values = [np.zeros(2, np.float32)]
  rollout_samples.write(tmp_path, 0, [_group(0)], values, [UNTRAINED], CHAT)
  path = rollout_samples.write(
    tmp_path, 0, [_group(1)], values, [UNTRAINED], CHAT
  )
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  assert [line["group_id"] for line in lines] == [1, 1]


def _gap(engine, learner):
  return logprob_gap.Gap(
    engine=np.array(engine, np.float32),
    learner=np.array(learner, np.float32),
    lags=np.arange(len(engine), dtype=np.int32) % 3,
  )


def test_a_comparison_is_a_line_and_what_is_no_number_is_null(tmp_path):
  rollout_samples.write_gap(tmp_path, 1, _gap([-1.0, -2.0], [-1.5, -2.25]))
  path = rollout_samples.write_gap(tmp_path, 11, _gap([-1.0], [np.nan]))
  first, second = map(json.loads, path.read_text().splitlines())
  assert first == {
    "round": 1,
    "tokens": 2,
    "mean": 0.375,
    "max": 0.5,
    "engine": [-1.0, -2.0],
    "learner": [-1.5, -2.25],
    "lags": [0, 1],
  }
  assert (second["max"], second["learner"]) == (None, [None])


def test_of_a_large_comparison_512_tokens_are_written(tmp_path):
  gap = _gap([-1.0] * 5000, [-1.0] * 4321 + [-3.0] + [-1.0] * 678)
  path = rollout_samples.write_gap(tmp_path, 1, gap)
  row = json.loads(path.read_text())
  assert (row["tokens"], row["max"]) == (5000, 2.0)
  assert [len(row[key]) for key in ("engine", "learner", "lags")] == [512] * 3
  # The largest is among them.
  assert row["learner"].count(-3.0) == 1
