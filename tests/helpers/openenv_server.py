"""A server written with the package openenv: say the last digit of the seed.

python openenv_server.py PORT
"""

# pyright: reportMissingImports=false

import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State
from openenv.core.env_server.http_server import create_fastapi_app


class Answer(Action):
  """An answer."""

  message: str


class Told(Observation):
  """What the agent is told."""

  text: str


class Digits(Environment):
  """One question, and one answer."""

  SUPPORTS_CONCURRENT_SESSIONS = True

  def reset(self, seed=None, episode_id=None, **fields):
    self._digit = str((seed or 0) % 10)
    return Told(text="which digit?")

  def step(self, action, timeout_s=None, **fields):
    if action.message == "crash":
      raise RuntimeError("boom")
    right = action.message == self._digit
    return Told(text="over", done=True, reward=float(right))

  @property
  def state(self):
    return State()


if __name__ == "__main__":
  app = create_fastapi_app(Digits, Answer, Told, max_concurrent_envs=8)
  uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
