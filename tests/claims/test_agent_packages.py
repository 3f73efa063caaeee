"""Agents of other packages, unchanged, as processes: make agents."""

import dataclasses
import pathlib

import pytest

from envs import agents
from launch.gateway import agent_server
from rl.agents import agent_player
from rl.testing import scripted_engine
from tests.helpers import openai_server
from tests.helpers import players_under_test as players

HERE = pathlib.Path(__file__).parent
# Environments of their own: `make agents` makes them.
PROGRAMS = {"sdk_agent": ".venv-agents", "verifiers_agent": ".venv-verifiers"}

pytestmark = [pytest.mark.process, pytest.mark.slow]
HF = openai_server.HF
CALL = (
  '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
)
LIMITS = dataclasses.replace(
  players.ONE, max_tokens=8000, turn_tokens=400, step_s=240.0
)


@pytest.mark.parametrize("program", PROGRAMS)
async def test_an_agent_of_another_package_calls_its_tool_and_is_recorded(
  program,
):
  python = HERE.parents[1] / PROGRAMS[program] / "bin" / "python"
  if not python.exists():
    pytest.skip("make agents installs it")

  asked = []

  def answer(request):
    asked.append(request)
    return HF.encode_answer("5" if len(asked) > 1 else CALL).tolist()

  served = scripted_engine.ScriptedEngine(answer)
  served.capabilities = dataclasses.replace(
    served.capabilities, constraints=True, vocab_size=HF.vocab_size
  )
  command = (str(python), str(HERE / "programs" / f"{program}.py"))
  playing = players.player(
    agents.OpenAI(command=command), served, limits=LIMITS
  )
  plays = agent_player.AgentPlayer(playing.router, HF, agent_server.listen)
  playing = dataclasses.replace(playing, agents=plays, chat=HF)
  try:
    (played,) = (await players.begin(playing).run()).trajectories
    await players.closed(playing)
  finally:
    await plays.close()
  assert (played.reward, played.fault) == (1.0, "")
  (one,) = played.conversations
  answers = [turn.tokens.tolist() for turn in one.turns]
  assert answers == [HF.encode_answer(x).tolist() for x in (CALL, "5")]
