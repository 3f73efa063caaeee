"""Programs in the sandbox: many ways out of it, and none of them open.

All escapes run once, a few at a time, against one set of canaries: a secret in
files, the environment and another process, sockets that count who connects, and
files that must stay as they are. Each test looks at one escape.
"""

import asyncio
import contextlib
import ctypes
import dataclasses
import os
import pathlib
import secrets
import signal
import socket
import subprocess
import sys

import pytest

from envs.sandbox import bubblewrap, sandbox
from tests.helpers import machine_speed, sandbox_escapes

pytestmark = pytest.mark.process

# The number of open files tells its processes from all others.
BOX = sandbox.Sandbox(
  wall_s=10,
  cpu_s=1,
  memory_mib=128,
  disk_mib=4,
  processes=6,
  open_files=59,
  output_kib=16,
)

ESCAPES = sandbox_escapes.ESCAPES
# The others end by themselves, with 0.
STATUS = {
  "kill of the group": "error",
  "fork bomb": "timeout",
  "memory": "memory",
  "mmap": "error",  # OSError of mmap: cannot allocate memory.
  "huge output": "output",
  "endless output": "output",
  "sleep": "timeout",
  "busy loop": "timeout",
  "ignored signals": "error",  # By the second limit of CPU time: SIGKILL.
  "busy processes": "timeout",
  "closed streams": "timeout",
  "stopped process": "timeout",
}
SHORT = {
  "fork bomb",
  "sleep",
  "busy processes",
  "closed streams",
  "stopped process",
}


@dataclasses.dataclass
class Host:
  """Canaries, and what has become of them when all escapes have run."""

  secret: str
  values: dict[str, str | int]
  visits: list[str]
  results: dict[str, sandbox.Execution]
  survivors: dict[str, list[int]]
  changes: list[str]


def _processes() -> list[int]:
  """Returns the living processes of a sandbox with the limits of BOX."""
  found = []
  for path in pathlib.Path("/proc").glob("[0-9]*"):
    with contextlib.suppress(OSError):
      limits = (path / "limits").read_text()
      state = (path / "stat").read_text().rpartition(")")[2].split()[0]
      if "open files            59 " in limits and state not in "ZX":
        found.append(int(path.name))
  return found


async def _run_all(host: Host) -> None:
  """Runs the escapes, three at a time, and a few one by one."""
  few = asyncio.Semaphore(3)

  async def run(name: str) -> None:
    code = (
      sandbox_escapes.program(ESCAPES[name], host.values)
      + 'print("tried", flush=True)'
    )
    box = dataclasses.replace(BOX, wall_s=2.5) if name in SHORT else BOX
    async with few:
      host.results[name] = await box.run(code, stdin="x" * 100_000)

  alone = ["daemon", "time bomb", "closed streams", "fork bomb"]
  await asyncio.gather(*(run(n) for n in ESCAPES if n not in alone))
  for name in alone:
    await run(name)
    host.survivors[name] = _processes()
  await asyncio.sleep(0.4)  # Until the time bomb would go off.


def _listen(name, where, visits, stack):
  """Returns a server; `visits` gets its name when somebody came."""
  family, kind, address = where
  server = stack.enter_context(socket.socket(family, kind))
  server.bind(address)
  server.setblocking(False)
  if kind == socket.SOCK_STREAM:
    server.listen()

  def look():
    with contextlib.suppress(BlockingIOError):
      server.accept() if kind == socket.SOCK_STREAM else server.recv(1)
      visits.append(name)

  return server, look


@pytest.fixture(scope="module")
def host(tmp_path_factory):
  """Runs all escapes."""
  secret = secrets.token_hex(16)
  place = tmp_path_factory.mktemp("host")
  (place / "secret").write_text(secret)
  canary = place / "canary"
  canary.write_text("untouched")
  canary.chmod(0o666)
  place.chmod(0o777)
  with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
    patch.setenv("HOME", str(place))
    patch.setenv("SECRET", secret)
    patch.setattr(sys, "pycache_prefix", None)
    visits = []
    stream, datagram = socket.SOCK_STREAM, socket.SOCK_DGRAM
    abstract = f"\0{secrets.token_hex(8)}"
    servers = {
      name: _listen(name, where, visits, stack)
      for name, where in {
        "ipv4": (socket.AF_INET, stream, ("127.0.0.1", 0)),
        "ipv6": (socket.AF_INET6, stream, ("::1", 0)),
        "udp": (socket.AF_INET, datagram, ("127.0.0.1", 0)),
        "unix": (socket.AF_UNIX, stream, str(place / "socket")),
        "abstract": (socket.AF_UNIX, stream, abstract),
      }.items()
    }
    victim = stack.enter_context(subprocess.Popen(["sleep", "600"]))
    stack.callback(victim.kill)
    open_file = stack.enter_context(open(canary, "a"))
    os.set_inheritable(open_file.fileno(), True)
    values = {
      "secret": str(place / "secret"),
      "canary": str(canary),
      "home": str(place),
      "source": __file__,
      "victim": victim.pid,
      "parent": os.getpid(),
      "unix": str(place / "socket"),
      "abstract": abstract,
      **{n: servers[n][0].getsockname()[1] for n in ("ipv4", "ipv6", "udp")},
    }
    host = Host(secret, values, visits, {}, {}, [])
    name = socket.gethostname()
    tree = sorted(os.listdir("/") + os.listdir("/usr") + os.listdir(sys.prefix))
    null = os.stat("/dev/null").st_mode
    asyncio.run(_run_all(host))
    host.survivors["the end"] = _processes()
    for _, look in servers.values():
      look()
    status = pathlib.Path(f"/proc/{victim.pid}/status").read_text()
    host.changes += [
      what
      for what, is_changed in {
        "canary": canary.read_text() != "untouched",
        "files": sorted(os.listdir(place)) != ["canary", "secret", "socket"],
        "directories": tree
        != sorted(
          os.listdir("/") + os.listdir("/usr") + os.listdir(sys.prefix)
        ),
        "null": os.stat("/dev/null").st_mode != null,
        "hostname": socket.gethostname() != name,
        "victim": victim.poll() is not None or "TracerPid:\t0" not in status,
      }.items()
      if is_changed
    ]
    yield host


@pytest.mark.parametrize("name", ESCAPES)
def test_no_escape_succeeds(host, name):
  result = host.results[name]
  assert result.status == STATUS.get(name, "ok"), result.stderr[-2000:]
  assert "tried" in result.stdout  # It did not fail before.
  output = result.stdout + result.stderr
  assert "ESCAPED" not in output
  assert host.secret not in output
  assert "uid=0" not in output
  assert len(output) <= 2 * BOX.output_kib * 1024
  # The wall time, and some for a busy machine.
  assert result.seconds < (2.5 if name in SHORT else BOX.wall_s) + 10


def test_nothing_outside_has_changed(host):
  assert host.changes == []


def test_nobody_has_called(host):
  assert host.visits == []


@pytest.mark.parametrize(
  "name", ["daemon", "time bomb", "closed streams", "fork bomb", "the end"]
)
def test_nothing_is_left_behind(host, name):
  assert host.survivors[name] == []


@pytest.mark.parametrize("name", ["home", "dots", "symlink", "environment"])
def test_without_a_sandbox_the_secret_is_found(host, name, tmp_path):
  # The canaries are where the escapes look for them.
  patched = {"canary": str(tmp_path / "x")}
  code = sandbox_escapes.program(
    ESCAPES[name].replace("write", "str"), host.values | patched
  )
  done = subprocess.run(
    [sys.executable, "-c", code],
    cwd=tmp_path,
    capture_output=True,
    text=True,
    check=True,
  )
  assert host.secret in done.stdout


async def test_a_caller_that_is_cancelled_leaves_no_process():
  run = asyncio.create_task(BOX.run("import time; time.sleep(60)"))
  async with asyncio.timeout(machine_speed.scaled(10)):
    while not (found := _processes()):
      await asyncio.sleep(0.02)
  run.cancel()
  with pytest.raises(asyncio.CancelledError):
    await run
  assert found
  assert not _processes()


async def test_a_caller_that_is_cancelled_at_any_time_leaves_no_process():
  async def cancel(after_s):
    run = asyncio.create_task(BOX.run("import time; time.sleep(60)"))
    await asyncio.sleep(after_s)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
      await run

  # Together they start slowly, so that many are cancelled in the middle.
  async with asyncio.timeout(machine_speed.scaled(30)):
    await asyncio.gather(*(cancel(0.01 * n) for n in range(60)))
  assert not _processes()


def test_a_process_that_adopts_orphans_keeps_no_zombies():
  # Process 1 of a sandbox outlives bwrap. The option is PR_SET_CHILD_SUBREAPER.
  prctl, adopts = ctypes.CDLL(None).prctl, 36
  prctl(adopts, 1, 0, 0, 0)
  try:
    assert asyncio.run(BOX.run("print(1)")).status == "ok"
    zombies = []
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
      with contextlib.suppress(OSError):
        name, _, rest = path.read_text().rpartition(")")
        state, parent, *_ = rest.split()
        if "(bwrap" in name and (state, int(parent)) == ("Z", os.getpid()):
          zombies.append(path)
    assert zombies == []
  finally:
    prctl(adopts, 0, 0, 0, 0)


def test_without_bubblewrap_nothing_runs(monkeypatch, tmp_path):
  monkeypatch.setenv("PATH", str(tmp_path))
  with pytest.raises(
    bubblewrap.SandboxError, match="apt-get install bubblewrap"
  ):
    asyncio.run(BOX.run("print(1)"))


def test_where_namespaces_are_not_permitted_nothing_runs(monkeypatch, tmp_path):
  bwrap = tmp_path / "bwrap"
  bwrap.write_text("#!/bin/sh\necho 'bwrap: No permissions' >&2\nexit 1\n")
  bwrap.chmod(0o755)
  monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
  with pytest.raises(bubblewrap.SandboxError, match="No permissions"):
    asyncio.run(BOX.run("print(1)"))


def test_a_machine_whose_calls_are_not_known_is_refused(monkeypatch):
  monkeypatch.setattr(bubblewrap.platform, "machine", lambda: "riscv64")
  bubblewrap._filter.cache_clear()
  with pytest.raises(bubblewrap.SandboxError, match="riscv64"):
    asyncio.run(BOX.run("print(1)"))


async def test_a_process_that_outlives_its_kill_is_an_error(monkeypatch):
  process = await BOX.start("import time; time.sleep(60)")
  with monkeypatch.context() as patch:
    patch.setattr(bubblewrap, "_DEATH_S", 0.1)
    patch.setattr(process, "kill", lambda: None)
    with pytest.raises(bubblewrap.SandboxError, match=r"alive 0\.1 s after"):
      await process.end()
  os.killpg(process._process.pid, signal.SIGKILL)
  await process.wait()
