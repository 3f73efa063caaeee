"""launch.reward_server: the same grades wherever a reward is computed."""

import asyncio
import functools
import json
import re
import shutil
import signal
import subprocess

import pytest

from envs import base, mixture
from envs.offload import http, process_pool
from envs.rewards import code_reward, comparison, rewards
from launch import reward_server
from launch.http import access, http_server
from tests.envs.offload import rewards_to_send
from tests.helpers import commands, machine_speed

pytestmark = pytest.mark.process

TASK = base.Task("sum/train/0", 0, "train", 7, answer="1/2")
SCHEMA = '{"type": "object", "required": ["a"]}'
REWARDS = {
  "outcome": rewards.Outcome(),
  "exact": rewards.ExactMatch(),
  "numeric": rewards.NumericMatch(relative=0.01),
  "math": rewards.MathMatch(find="whole"),
  "schema": rewards.JsonSchema(schema=SCHEMA),
  "by_task": mixture.ByTask((mixture.RewardRule("sum", rewards.Outcome()),)),
  "shortest": comparison.Shortest(among=rewards.NumericMatch()),
}
ALL = rewards.Weighted(
  tuple(rewards.Criterion(name, one, 0.3) for name, one in REWARDS.items())
)
CALL = base.ToolCall("add", '{"a": 1}', "c")


def said(text, *steps, **fields):
  steps = steps or (0.0,)  # Without one there is no outcome.
  return base.Transcript(
    [base.Message("user", "½?"), base.Message("assistant", text, **fields)],
    steps,
  )


TRANSCRIPTS = [
  said("1/2", 0.1, 0.2),  # Their sum is no round number: 0.30000000000000004.
  said("0.504", -1e300),
  said(r"\frac{1}{2}", reasoning="half"),
  said('{"a": 1}', 1, tool_calls=(CALL,)),
  said("\ud800 1/2"),  # Half a surrogate pair.
  said(""),
]


def serving(function, scenario):
  """Returns what a scenario makes of the address of a server."""

  async def run():
    try:
      async with http_server.listening(
        function.app, http_server.bind(), grace_s=1
      ) as address:
        return await scenario(address)
    finally:
      await function.close()

  return asyncio.run(run())


async def grades(reward):
  try:
    return await reward(TASK, TRANSCRIPTS)
  finally:
    if isinstance(reward, base.Offloaded):
      await reward.close()


def test_grades_are_the_same_wherever_a_reward_is_computed():
  async def scenario(address):
    return [
      await grades(process_pool.ProcessPool(reward=ALL)),
      await grades(http.Http(url=address, reward=ALL)),
    ]

  here = asyncio.run(grades(ALL))
  assert [set(grade.parts) for grade in here] == [set(REWARDS)] * 6
  assert sum(here[0].parts.values()) > 4  # Most rewards grade it well.
  function = reward_server.Function(ALL, num_processes=1)
  assert serving(function, scenario) == [here, here]


@pytest.mark.skipif(
  shutil.which("bwrap") is None, reason="bubblewrap is not installed"
)
def test_unit_tests_run_in_the_sandbox_of_the_other_side():
  task = base.Task("code/train/0", 0, "train", 0, "assert add(2, 3) == 5")
  good = said("```python\ndef add(a, b):\n  return a + b\n```")
  reward = code_reward.UnitTests()

  async def scenario(address):
    client = http.Http(url=address, reward=reward)
    try:
      return await client(task, [good, said("")])
    finally:
      await client.close()

  found = serving(reward_server.Function(reward), scenario)
  assert [grade.value for grade in found] == [1.0, 0.0]


def test_a_part_that_the_config_sends_elsewhere_is_served():
  part = http.Http(url="http://other", reward=rewards.NumericMatch())
  whole = rewards.Weighted((rewards.Criterion("right", part),))

  async def scenario(address):
    client = http.Http(url=address, reward=rewards.NumericMatch())
    try:
      await client.open()
      return await client(TASK, TRANSCRIPTS[:1])
    finally:
      await client.close()

  (grade,) = serving(reward_server.Function(whole), scenario)
  assert grade.value == 1.0


def test_another_reward_is_refused_before_a_run_and_in_it():
  loose = rewards.NumericMatch(relative=0.5)

  async def scenario(address):
    client = http.Http(url=address, reward=loose)
    try:
      for call in (client.open(), client(TASK, TRANSCRIPTS)):
        with pytest.raises(OSError, match=r"relative=0.5.*") as error:
          await call
        assert address in str(error.value)
    finally:
      await client.close()

  serving(reward_server.Function(rewards.NumericMatch()), scenario)


@pytest.mark.parametrize(
  ("body", "message"),
  [
    (b"{", "400: no request for grades: JSONDecodeError"),
    (b'{"transcripts": []}', "400: no request for grades: KeyError: 'reward'"),
    (
      json.dumps(
        {
          "reward": "Told()",
          "task": {"id": "t", "index": 0, "split": "train", "seed": 0},
          "transcripts": [
            {
              "messages": [
                {"role": "assistant", "content": "raise", "tool_calls": []}
              ],
              "step_rewards": [],
            }
          ],
        }
      ).encode(),
      "500: OSError: no such file",
    ),
    (b" " * ((16 << 20) + 1), "413: the body is over 16777216 bytes"),
  ],
  ids=["no-json", "no-field", "raises", "large"],
)
def test_a_request_that_fails_gets_the_reason(body, message):
  async def scenario(address):
    connections = http.Connections(20.0)
    try:
      with pytest.raises(OSError, match=re.escape(message)):
        await connections.request("POST", f"{address}/", body)
    finally:
      await connections.close()

  serving(reward_server.Function(rewards_to_send.Told()), scenario)


def test_a_server_with_keys_answers_their_holders(tmp_path, monkeypatch):
  path, key = tmp_path / "keys", "0123456789abcdef"
  path.write_text(key)
  reward = rewards.NumericMatch()
  rules = access.Access(keys=access.read_keys(path))

  async def scenario(address):
    found = []
    for sent in ("", key, "another key of 23 bytes"):
      monkeypatch.setenv("MY_KEY", sent)
      client = http.Http(url=address, reward=reward, key="MY_KEY")
      for ask in (client.open, functools.partial(client, TASK, TRANSCRIPTS)):
        try:
          await ask()
          found.append("answered")
        except OSError as error:
          found.append(str(error).partition(" answered ")[2][:22])
      await client.close()
    return found

  found = serving(reward_server.Function(reward, rules=rules), scenario)
  refused = "401: this server needs"
  assert found == [refused] * 2 + ["answered"] * 2 + [refused] * 2


def test_pages_of_other_origins_are_refused():
  async def scenario(address):
    connections = http.Connections(20.0)
    headers = {"origin": "http://evil.example"}
    try:
      with pytest.raises(OSError, match="403: pages of http://evil"):
        await connections.request("GET", f"{address}/", headers=headers)
    finally:
      await connections.close()

  serving(reward_server.Function(rewards.Outcome()), scenario)


def test_a_late_call_is_ended():
  reward = rewards_to_send.Slow(seconds=60.0)

  async def scenario(address):
    client = http.Http(url=address, reward=reward)
    try:
      with pytest.raises(OSError, match="500: TimeoutError"):
        await client(TASK, TRANSCRIPTS)
    finally:
      await client.close()

  serving(reward_server.Function(reward, deadline_s=0.2), scenario)


def test_the_command_serves_until_a_signal():
  process = commands.start(
    "launch.reward_server",
    *("--reward=exact_match(find=boxed)", "--port=0", "--processes=1"),
    stderr=subprocess.PIPE,
  )
  with process:
    try:
      assert process.stdout
      line = process.stdout.readline()
      found = re.search(r"at (http://\S+)\n", line)
      assert found, line
      reward = rewards.ExactMatch(find="boxed")
      client = http.Http(url=found[1], reward=reward)

      async def scenario():
        await client.open()
        answer = said(r"\boxed{1/2}")
        try:
          return [(await client(TASK, [answer]))[0].value, client.counts()]
        finally:
          await client.close()

      value, counts = asyncio.run(scenario())
      process.send_signal(signal.SIGTERM)
      _, errors = process.communicate(timeout=machine_speed.scaled(60))
    finally:
      process.kill()
  assert (value, counts["cold_starts"]) == (1.0, 1.0)
  assert (process.returncode, "Traceback" in errors) == (0, False), errors


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--reward=exact_macth"], "did you mean exact_match?"),
    ([], "--config is missing"),
    (["--reward=outcome", "--config.seed=1"], "--reward stands for itself"),
    (["--reward=outcome", "--host=256.1.1.1"], "--host=256.1.1.1 --port=8080"),
    (["--reward=outcome", "--host=0.0.0.0", "--port=0"], "--api_key_file=FILE"),
  ],
)
def test_flags_that_cannot_work_say_so(arguments, message):
  result = commands.run("launch.reward_server", *arguments)
  assert result.returncode == 2
  assert message in result.stderr
