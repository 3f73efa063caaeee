"""A reward computed over HTTP, by servers that fail in every way."""

import asyncio
import json

import pytest

from envs import base
from envs.offload import calls, http
from envs.rewards import rewards
from rl.data import trajectory
from rl.rollout import grading
from tests.helpers import scripted_http

TASK = base.Task("sum/train/0", 0, "train", 0, answer="4")
SAID = base.Transcript([base.Message("assistant", "4")], [])
REWARD = rewards.NumericMatch()
GRADES = json.dumps({"grades": [{"value": 1.0, "parts": {"n": 1.0}}]}).encode()
reply = scripted_http.reply
ONCE = grading.Retries(attempts=1, deadline_s=30.0)


def scripted(*answers):
  """Returns answers in turn, the last of them for good."""
  left = list(answers)
  return lambda path, body, head: left.pop(0) if len(left) > 1 else left[0]


def graded(answer, retries=ONCE, **settings):
  """Returns the graded trajectory, and the URL and counters of its reward."""

  async def run():
    async with scripted_http.serve(answer) as address:
      return await grade(address)

  async def grade(address):
    url = f"{address}/grade"
    reward = http.Http(url=url, reward=REWARD, **settings)
    graders = grading.Graders(reward, retries)
    ungraded = trajectory.Trajectory(
      task_id=TASK.id,
      group_id=0,
      index=0,
      turns=[],
      status=trajectory.Status.COMPLETED,
    )
    try:
      record = await graders.grade(ungraded, SAID, TASK)
      return record, url, graders.costs()
    finally:
      await graders.close()

  return asyncio.run(run())


@pytest.mark.parametrize(
  ("answer", "message"),
  [
    (
      reply(b'{"error": "OSError: x"}', "500 Oops"),
      "answered 500: OSError: x",
    ),
    (reply(b"busy", "503 Busy"), "answered 503: b'busy'"),
    (reply(b"", "302 Found"), "answered 302: b''"),
    (None, "took over 0.2 s"),
    (b"", "cannot be reached: "),
    (
      reply(GRADES[:9], length=len(GRADES)),
      "cannot be reached: ",
    ),
    (b"no http at all\r\n\r\n", "cannot be reached: "),
    (
      reply(b"a" * (100 << 20)),
      "answered more than 4,194,304 bytes",
    ),
    (reply(b"<html>"), "answered b'<html>', which are no grades"),
    (reply(b'{"grades": [1]}'), "which are no grades"),
    (reply(b"[" * 100_000), "which are no grades"),
    (
      reply(b'{"grades": []}'),
      "reward returned [], not a list of one Grade",
    ),
    (
      reply(b'{"grades": [{"value": NaN, "parts": {}}]}'),
      "reward nan is not a finite number",
    ),
  ],
  ids=[
    *("500", "503", "redirect", "hang", "closes", "half", "no-http"),
    *("100MB", "html", "no-grade", "deep", "too-few", "nan"),
  ],
)
def test_a_bad_answer_is_a_fault_of_that_trajectory(answer, message):
  timeout_s = 0.2 if answer is None else 20.0
  record, url, _ = graded(scripted(answer), timeout_s=timeout_s)
  assert record.status is trajectory.Status.REWARD_FAULT
  assert record.reward is None
  assert message in record.fault
  if not message.startswith("reward"):
    assert url in record.fault


def test_a_bad_answer_is_followed_by_another_call():
  handle = scripted(reply(b"", "500 Oops"), reply(GRADES))
  retries = grading.Retries(attempts=2, first_wait_s=0.01, max_wait_s=0.01)
  record, _, costs = graded(handle, retries)
  assert (record.reward, record.parts) == (1.0, {"n": 1.0})
  assert costs["offloaded_calls"] == 2


async def test_a_server_that_is_not_there_is_a_fault_that_names_it():
  reward = http.Http(url="http://127.0.0.1:9/x", reward=REWARD)

  try:
    with pytest.raises(OSError, match=r"127\.0\.0\.1:9/x cannot be reached"):
      await reward.open()
  finally:
    await reward.close()


@pytest.mark.parametrize(
  "said", [b'{"rewards": true}', b'{"rewards": 3}', b"3", b"[" * 100_000]
)
async def test_what_lists_no_rewards_is_no_reward_server(said):
  async with scripted_http.serve(scripted(reply(said))) as address:
    reward = http.Http(url=address, reward=REWARD)
    try:
      with pytest.raises(calls.CallError, match="is no reward server"):
        await reward.open()
    finally:
      await reward.close()


def test_a_hung_call_is_answered_by_its_hedge():
  handle = scripted(None, reply(GRADES))
  record, _, costs = graded(handle, hedge=http.calls.Hedge(first_s=0.1))
  assert record.reward == 1.0
  assert (costs["hedges"], costs["hedges_won"]) == (1, 1)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"url": "localhost:80"}, "url=localhost:80 must begin with http://"),
    ({"url": "http://x", "timeout_s": 0}, "timeout_s=0 must be finite"),
    ({"url": "http://x", "max_connections": 0}, "must be at least 1"),
  ],
)
def test_settings_that_cannot_work_are_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    http.Http(reward=REWARD, **fields)
