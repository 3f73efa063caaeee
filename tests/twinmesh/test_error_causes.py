"""Examples of errors in the documentation are what is printed, word by word."""

import asyncio
import contextlib
import dataclasses
import json
import pathlib
import sys
import tempfile
import types
from typing import Any, cast

import numpy as np
import pytest
from absl.testing import flagsaver

from configs import guess_number_moe
from envs import agents, base, rows, single_turn
from envs.offload import calls
from envs.sandbox import bubblewrap
from envs.suites import gymnasium
from envs.tools import tools
from launch import replay, status, sweep
from launch.cli import config_file, flags, workdir
from launch.gateway import error_replies, session_record
from launch.http import access, admission, http_server, json_fields
from launch.report import comparison, log_check
from launch.run import round_warnings
from models import config as model_config
from models import untrusted_files
from models.chat import hf_chat, template
from models.hf import config as hf_config
from models.hf import load
from rl.agents import sessions
from rl.backends import addresses, host
from rl.data import packing
from rl.engine import contract
from rl.engine.builtin import settings as engine_settings
from rl.engine.sglang import weights
from rl.loop import trackers
from rl.planning import calibration, problem
from rl.pools import placement
from rl.remote import joining
from rl.rollout import grading
from rl.runtime import checkpoint, watchdog
from rl.schedule import overlap
from rl.settings import checks, overrides
from rl.train import learner
from twinmesh import error_codes, top_packages
from twinmesh.error_causes import CAUSES

SEES = {cause.code: cause.sees for cause in CAUSES}
RUN = guess_number_moe.get_config()
CONFIG = "def get_config():\n  return grpo()\n"


def run_dir(name="first", **files):
  directory = pathlib.Path("runs", name)
  directory.mkdir(parents=True)
  for file, text in files.items():
    (directory / file.replace("_json", ".json")).write_text(text)
  return directory


def missing_config():
  with flagsaver.flagsaver():
    flags.parse(["program"])
    flags.load_from_command_line()


def two_backends():
  with flagsaver.flagsaver():
    flags.parse(["program", "--config.placement.backend=ray"])
    flags.override("placement.backend", "slurm", "backend")


def existing_file():
  pathlib.Path("traces").touch()
  workdir.make_writable(pathlib.Path("traces"), "--timeline=traces")


def missing_file():
  pathlib.Path("mine.py").touch()
  flags.load("mien.py")


def failing_file():
  pathlib.Path("mine.py").write_text(CONFIG)
  flags.load("mine.py")


def empty_file():
  pathlib.Path("mine.py").write_text("")
  flags.load("mine.py")


def no_sweep():
  pathlib.Path("mine.py").write_text("")
  sweep._listed(pathlib.Path(), "mine.py", {})


def unknown_code():
  kept = {"m": {"path": "mine.py", "lines": ["print(1)"]}}
  run_dir("theirs", config_json=json.dumps({"config_files": kept}))
  with flagsaver.flagsaver():
    flags.parse(["program"])
    config_file.read_json(pathlib.Path("runs/theirs/config.json"))


def without_rounds():
  status._rounds(run_dir(config_json="{}"))


def unnamed():
  overrides.to_json(dataclasses.replace(RUN, reward=lambda: None))


def set_to(path, text):
  return lambda: overrides.override(RUN, path, text)


def replaced(**fields):
  return lambda: dataclasses.replace(RUN, **fields).validate()


def join_one_process():
  with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
    run_dir = pathlib.Path("runs/first")
    run_dir.mkdir(parents=True)
    (run_dir / "config.json").touch()
    joining.read(run_dir, is_alive=True)


def ready():
  dataclasses.replace(
    overlap.sync(4), consume="ready", max_staleness=2, wait_for_round=False
  ).validate()


class Mute:
  """An environment of one's own without demonstrations."""

  name = "mine"


class OfSteps:
  """A reward of one's own that needs the environment."""

  stateless = False


class Untyped:
  """A toolbox of one's own."""

  def add(self, x) -> str:
    """Adds."""
    return x


def run_of_other_settings():
  workdir.claim("runs/first", RUN).close()
  pathlib.Path("runs/first/checkpoints/1").mkdir(parents=True)
  workdir.claim("runs/first", dataclasses.replace(RUN, seed=1))


def run_in_use():
  with workdir.claim("runs/first", RUN):
    workdir.claim("runs/first", RUN)


def replaced_directory():
  path = pathlib.Path("runs/first")
  path.mkdir(parents=True)
  with workdir.held(path) as check:
    path.rename("moved")
    path.mkdir()
    check()


def all_damaged():
  pathlib.Path("runs/first/checkpoints/5.damaged").mkdir(parents=True)
  workdir.check_none_damaged("runs/first")


def other_model():
  saved = {"params/embed": {"like": "float32[512,64]"}}
  wanted = {"params/embed": np.zeros((600, 64), np.float32)}
  path = pathlib.Path("runs/first/checkpoints/10")
  checkpoint._check_same_model(path, saved, wanted)


def unsaved():
  saved = checkpoint.Checkpoints(pathlib.Path("runs/first/checkpoints"), 1)
  with contextlib.closing(saved), saved.saving("round 10"):
    raise OSError("No space left on device")


def readable_token():
  file = pathlib.Path("token")
  file.write_text("x" * 64)
  file.chmod(0o644)
  host.read_token(file)


def taken_port():
  with http_server.bind() as bound:
    bound.listen()
    http_server.bind_flags("127.0.0.1", bound.getsockname()[1])


def row_without_a_field():
  pathlib.Path("train.jsonl").write_text('{"text": "a", "answer": "b"}\n')
  data = rows.Rows(data="train.jsonl", eval_data="train.jsonl")
  source = single_turn.SingleTurn(
    rows=data, prompt="{question}", answer="answer"
  )
  source.validate()


def rewriting_template():
  source = "{% for m in messages[-1:] %}<s>{{ m.content }}<e>{% endfor %}"
  template.ChatTemplate(source, ("<s>", "<e>")).end_of_turn()


def stalled():
  dog = watchdog.Watchdog()

  async def wait():
    never = asyncio.get_running_loop().create_future()
    await dog.wait(never, owner="learner", what="a group", deadline_s=0.01)

  asyncio.run(wait())


def raising(error):
  def make():
    raise error

  return make


def busy():
  one = admission.Admission(1)
  with one.answering("a"), one.answering("a"):
    pass


EXACT = {
  "TM-C02": missing_config,
  "TM-C03": two_backends,
  "TM-C05": existing_file,
  "TM-F01": missing_file,
  "TM-F02": failing_file,
  "TM-F03": empty_file,
  "TM-F04": no_sweep,
  "TM-F05": unknown_code,
  "TM-F06": without_rounds,
  "TM-S01": set_to("rollout.group_sise", "8"),
  "TM-S02": set_to("rounds", "many"),
  "TM-S03": set_to("algorithm", "mine.Grpo()"),
  "TM-S04": lambda: engine_settings.EngineSettings(slots=0).validate(),
  "TM-S05": ready,
  "TM-S06": lambda: packing.plan([3], rows=6, length=8, shards=4),
  "TM-S07": lambda: dataclasses.replace(
    RUN,
    repeatable=True,
    placement=placement.Placement(learner_processes=2),
  )._validate_repeatable(),
  "TM-S09": lambda: problem.Space(schedules=()).validate(),
  "TM-P02": lambda: placement.Placement(
    decode=placement.MeshSpec(first_device=0)
  ).validate(),
  "TM-P04": lambda: addresses.KnownAddresses().validate(),
  "TM-P05": readable_token,
  "TM-P06": join_one_process,
  "TM-P08": lambda: weights.check(model_config.tiny(qk_norm=False)),
  "TM-W01": lambda: load.check("/models/qwen", RUN.model),
  "TM-W02": lambda: hf_config._family({"architectures": ["Gpt"]}),
  "TM-W03": lambda: hf_chat.HfChat.load("."),
  "TM-W04": rewriting_template,
  "TM-W05": lambda: untrusted_files.read_json("."),
  "TM-W06": lambda: model_config.tiny(num_heads=6, num_kv_heads=4).validate(),
  "TM-E01": lambda: gymnasium.FrozenLake(turns=0),
  "TM-E02": row_without_a_field,
  "TM-E03": lambda: grading.refuse_stateful(OfSteps()),
  "TM-E05": lambda: tools.of(Untyped, frozenset()),
  "TM-E07": lambda: agents.OpenAI(command=("agent",)).validate(),
  "TM-E08": lambda: base.demonstrator(cast(Any, Mute())),
  "TM-D01": lambda: workdir.check_exists("runs/first"),
  "TM-D02": run_in_use,
  "TM-D03": lambda: workdir._check_ours(run_dir(metrics_jsonl="")),
  "TM-D04": run_of_other_settings,
  "TM-D05": other_model,
  "TM-D06": all_damaged,
  "TM-D08": lambda: log_check.of_run(pathlib.Path("runs/first")),
  "TM-D10": lambda: replay.resolve("runs/first/skipped/1"),
  "TM-D11": lambda: calibration.read(pathlib.Path("runs/first")),
  "TM-D12": lambda: comparison.check_documented("succes"),
  "TM-D13": replaced_directory,
  "TM-H02": lambda: access.of_flags("0.0.0.0", "0.0.0.0", None),
  "TM-H03": lambda: http_server.read_tls("cert.pem", None),
}
"""Functions that raise the example of a code."""
ALIKE = {
  "TM-F07": unnamed,
  "TM-P01": lambda: placement.Placement(replicas=512).layouts(),
  "TM-E04": raising(
    calls.CallError("http://127.0.0.1:9000 cannot be reached: no route")
  ),
  "TM-E06": raising(bubblewrap.SandboxError(bubblewrap.advice("no bwrap"))),
  "TM-D07": unsaved,
  "TM-R01": stalled,
  "TM-R02": raising(contract.EngineClosed("all 2 engines have stopped")),
  "TM-R03": raising(learner.LearnerLost("learner 1 has ended")),
  "TM-R04": raising(round_warnings.Hopeless("rounds in a row")),
  "TM-R05": raising(round_warnings.OutOfBounds("round 7: kl is 12")),
  "TM-R06": raising(FloatingPointError("round 12: updates in a row")),
  "TM-R08": raising(trackers.TrackerFailed("MLflow cannot be used")),
  "TM-H01": taken_port,
  "TM-H04": lambda: json_fields.get({}, "messages", list),
  "TM-H05": busy,
  "TM-H06": raising(sessions.FinishedSession("session a is finished")),
  "TM-H07": raising(session_record.Unrecorded("the disk is full")),
  "TM-X01": lambda: checks.installed("backend ray", "ray", "no_such_package"),
  "TM-X02": lambda: top_packages.check(pathlib.Path(), ["rl"]),
  "TM-X03": raising(RuntimeError("group 3 is not in flight")),
}
"""Functions whose error has other numbers or names than the example."""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setitem(sys.modules, "mine", types.ModuleType("mine"))


def raised(make) -> Exception:
  with pytest.raises(Exception) as error:  # noqa: PT011
    make()
  return error.value


@pytest.mark.parametrize("code", EXACT)
def test_an_example_is_the_message_of_an_error_with_its_code(code):
  error = raised(EXACT[code])
  assert error_codes.code_of(error) == code
  assert str(error) == SEES[code]


@pytest.mark.parametrize("code", ALIKE)
def test_an_error_of_the_same_cause_has_the_code(code):
  assert error_codes.code_of(raised(ALIKE[code])) == code


def test_every_code_of_a_reply_has_a_cause():
  known = {name for cause in CAUSES for name in cause.replies}
  given = {code for _, code in error_replies._STATUS.values()}
  assert given | {error_replies._REFUSED, "internal_error"} <= known
