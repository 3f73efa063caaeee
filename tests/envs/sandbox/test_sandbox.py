"""Programs in the sandbox: many ways out of it, and none of them open.

All escapes run once, a few at a time, against one set of canaries: a secret in
files, the environment and another process, sockets that count who connects, and
files that must stay as they are. Each test looks at one escape.
"""

import asyncio
import contextlib
import dataclasses
import math
import os
import pathlib
import secrets
import shutil
import socket
import subprocess
import sys

import pytest

from envs.sandbox import sandbox

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

PRELUDE = """
import contextlib, ctypes, errno, mmap, os, resource, signal, socket, stat
import subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def attempt(function, *args):
  try:
    return function(*args)
  except Exception as error:
    print(type(error).__name__, error)
def read(path):
  attempt(lambda: print(open(path, errors="replace").read()))
def write(path):
  attempt(lambda: open(path, "w").write("was here"))
def syscall(name, *args):
  number = NUMBERS[name][os.uname().machine == "aarch64"]
  if libc.syscall(number, *args) != -1:
    print("ESCAPED by", name)
"""
# Of calls that have no function in libc, x86_64 and aarch64.
NUMBERS = sandbox._DENIED | {
  "pivot_root": (155, 41),
  "capget": (125, 90),
  "clone": (56, 220),
  "fsopen": (430, 430),
}

ESCAPES = {
  # Network
  "ipv4": 'attempt(socket.create_connection, ("127.0.0.1", HOST["ipv4"]), 1)',
  "ipv6": 'attempt(socket.create_connection, ("::1", HOST["ipv6"]), 1)',
  "udp": """
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
attempt(s.sendto, b"x", ("127.0.0.1", HOST["udp"]))""",
  "unix socket": """
attempt(socket.socket(socket.AF_UNIX).connect, HOST["unix"])""",
  "abstract socket": """
attempt(socket.socket(socket.AF_UNIX).connect, HOST["abstract"])""",
  "dns": """
if attempt(socket.getaddrinfo, "example.com", 80):
  print("ESCAPED")""",
  "packet socket": """
if attempt(socket.socket, socket.AF_PACKET, socket.SOCK_RAW, 768):
  print("ESCAPED")""",
  "interfaces": """
if any(name != "lo" for _, name in socket.if_nameindex()):
  print("ESCAPED")""",
  # Reading
  "shadow": """
attempt(lambda: print("ESCAPED", open("/etc/shadow").read()))""",
  "passwd": """
attempt(lambda: print("ESCAPED", open("/etc/passwd").read()))""",
  "home": 'read(HOST["home"] + "/secret")',
  "temporary files": """
read(HOST["secret"])
print(attempt(os.listdir, os.path.dirname(HOST["secret"])))""",
  "dots": 'read("../" * 20 + HOST["secret"])',
  "source of the project": """
attempt(lambda: print("ESCAPED", open(HOST["source"]).read(20)))""",
  "proc of another": """
for pid in (1, HOST["victim"], HOST["parent"], "self", os.getppid()):
  for name in ("environ", "cmdline", "root" + HOST["secret"], "mem"):
    read(f"/proc/{pid}/{name}")""",
  "environment": "print(os.environ, os.environb)",
  "symlink": """
os.symlink(HOST["secret"], "link")
read("link")
write("link")""",
  "hard link": """
attempt(os.link, HOST["secret"], "link")
attempt(os.link, HOST["canary"], "other")
read("link")
write("other")""",
  "symlink race": """
def swap():
  while time.monotonic() < end:
    for target in ("mine", HOST["secret"], HOST["canary"]):
      with contextlib.suppress(OSError):
        os.symlink(target, "new")
        os.replace("new", "link")
end = time.monotonic() + 0.2
open("mine", "w").close()
threading.Thread(target=swap).start()
seen = set()
while time.monotonic() < end:
  with contextlib.suppress(OSError):
    seen.add(open("link").read())
    open("link", "w").write("was here")
print(seen)""",
  "directory handle": """
fd = os.open("/", os.O_RDONLY)
os.fchdir(fd)
attempt(os.chroot, "usr")
os.chdir("../../..")
read(HOST["secret"][1:])""",
  # Writing
  "root directory": 'write("/canary")',
  "usr": 'write("/usr/canary"); write("/usr/bin/canary")',
  "python's files": """
write(sys.prefix + "/canary")
write(sys.base_prefix + "/canary")
write(os.__file__)""",
  "bytecode": """
import json.tool as module
write(module.__cached__)
write(os.path.dirname(module.__cached__) + "/canary.pyc")
for path in sys.path:
  write(path + "/sitecustomize.py")
  write(path + "/canary.pth")""",
  "modes of files": """
for path in ("/dev/null", "/usr/bin", sys.executable):
  attempt(os.chmod, path, 0o777 if path != "/dev/null" else 0)
  attempt(os.chown, path, 1000, 1000)""",
  "inherited file": """
for fd in range(3, 59):
  with contextlib.suppress(OSError):
    os.write(fd, b"was here")
    print("ESCAPED by", fd)""",
  "standard streams": """
for fd in range(3):
  attempt(lambda: os.ftruncate(fd, 0))
  if not stat.S_ISFIFO(os.fstat(fd).st_mode):
    print("ESCAPED by", fd)""",
  # Devices and the kernel
  "devices": """
for name in ("mem", "kmsg", "tty", "sda", "vda", "fuse", "kvm", "ptmx"):
  attempt(lambda: print("ESCAPED", open("/dev/" + name, "rb")))
print(os.listdir("/dev"))""",
  "mknod": """
for mode in (stat.S_IFBLK, stat.S_IFCHR):
  attempt(lambda: print("ESCAPED", os.mknod(f"x{mode}", mode | 0o600, 259)))""",
  "mount": """
for kind in (b"tmpfs", b"proc", b"sysfs", b"devpts"):
  if not libc.mount(b"none", os.environb[b"HOME"], kind, 0, None):
    print("ESCAPED by", kind)
syscall("fsopen", b"tmpfs", 0)""",
  "remount": """
for flags in (32, 32 | 4096, 16384 | 262144):
  if not libc.mount(b"none", b"/usr", None, flags, None):
    print("ESCAPED by", flags)
write("/usr/canary")""",
  "umount": """
for path in (b"/usr", os.environb[b"HOME"], b"/"):
  if not libc.umount2(path, 2):
    print("ESCAPED from", path)""",
  "pivot_root": 'os.mkdir("old"); syscall("pivot_root", b".", b"old")',
  "chroot": 'attempt(lambda: print("ESCAPED", os.chroot("/usr")))',
  "unshare": """
for flag in (0x10000000, 0x00020000, 0x40000000, 0x20000000, 0x10020000):
  if not libc.unshare(flag):
    print("ESCAPED by", flag)""",
  "clone of a user namespace": """
pid = libc.syscall(NUMBERS["clone"][os.uname().machine == "aarch64"],
                   0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
if pid == 0:
  os._exit(0)
if pid > 0:
  print("ESCAPED")""",
  "setns": """
fd = os.open("/", os.O_RDONLY)
syscall("setns", fd, 0)
if hasattr(os, "pidfd_open"):
  attempt(lambda: syscall("setns", os.pidfd_open(os.getppid()), 0x10000000))
""",
  "setuid": """
for function in (os.setuid, os.setgid, os.seteuid):
  attempt(lambda: print("ESCAPED", function(0)))
attempt(lambda: print("ESCAPED", os.setgroups([0])))""",
  "setuid program": """
for command in (["su", "-c", "id"], ["passwd", "-S"], ["mount"], ["newgrp"]):
  attempt(lambda: print(subprocess.run(command, stdin=subprocess.DEVNULL,
                                       stdout=subprocess.PIPE, timeout=3)))
open("x", "w").write("#!/bin/sh\\nid")
attempt(os.chmod, "x", 0o6777)
print(attempt(subprocess.getoutput, "./x"))""",
  "capabilities": """
header = (ctypes.c_uint32 * 2)(0x20080522, 0)
data = (ctypes.c_uint32 * 6)()
libc.syscall(NUMBERS["capget"][os.uname().machine == "aarch64"], header, data)
if any(data):
  print("ESCAPED", *data)
if not libc.prctl(47, 2, 21, 0, 0):
  print("ESCAPED by an ambient capability")""",
  "sysctl": """
for name in ("kernel/core_pattern", "kernel/hostname", "vm/drop_caches"):
  write("/proc/sys/" + name)
write("/proc/sysrq-trigger")
write("/sys/kernel/uevent_helper")""",
  "hostname": """
attempt(lambda: print("ESCAPED", socket.sethostname("escaped")))""",
  "clock": """
attempt(lambda: print("ESCAPED", time.clock_settime(time.CLOCK_REALTIME, 1)))
""",
  "priority": """
attempt(lambda: print("ESCAPED", os.nice(-5)))
attempt(lambda: print("ESCAPED", os.sched_setscheduler(
    0, os.SCHED_FIFO, os.sched_param(9))))""",
  "higher limits": """
for name in ("AS", "NPROC", "CPU", "FSIZE", "NOFILE"):
  kind = getattr(resource, "RLIMIT_" + name)
  attempt(lambda: print("ESCAPED", resource.setrlimit(kind, (-1, -1))))""",
  "ptrace": """
for pid in (HOST["victim"], HOST["parent"], os.getppid()):
  syscall("ptrace", 16, pid, 0, 0)
  syscall("ptrace", 0x4206, pid, 0, 0)""",
  "memory of another": """
data = ctypes.create_string_buffer(64)
for pid in (HOST["victim"], os.getppid()):
  syscall("process_vm_readv", pid, data, 1, data, 1, 0)
  attempt(lambda: syscall("pidfd_getfd", os.pidfd_open(pid), 1, 0))""",
  "keyctl": """
syscall("keyctl", 0, -3, 1)
syscall("add_key", b"user", b"x", b"y", 1, -4)
syscall("request_key", b"user", b"x", None, -4)""",
  "io_uring": """
syscall("io_uring_setup", 8, ctypes.create_string_buffer(256))""",
  "bpf": 'syscall("bpf", 0, ctypes.create_string_buffer(128), 128)',
  "perf": """
a = ctypes.create_string_buffer(128)
syscall("perf_event_open", a, 0, -1, -1, 0)""",
  "userfaultfd": 'syscall("userfaultfd", 1)',
  "second table of system calls": """
for number in (0, 39, 101, 321, 425, 520, 521):
  if libc.syscall((1 << 30) + number, 0, 0, 0) != -1:
    print("ESCAPED by", number)""",
  # Signals
  "kill of the parent": """
for pid in (HOST["victim"], HOST["parent"], os.getppid()):
  attempt(os.kill, pid, signal.SIGKILL)
time.sleep(0.1)""",
  "kill of all": "attempt(os.kill, -1, signal.SIGKILL)",
  "kill of the group": """
print("tried", flush=True)
os.killpg(0, signal.SIGKILL)""",
  # Resources
  "fork bomb": """
print("tried", flush=True)
while True:
  with contextlib.suppress(OSError):
    os.fork()""",
  "count of processes": """
n = 1
with contextlib.suppress(OSError):
  while True:
    if not os.fork():
      time.sleep(60)
    n += 1
print(n)
if n > 6:
  print("ESCAPED")""",
  "thread bomb": """
done = threading.Event()
n = 1
with contextlib.suppress(RuntimeError):
  while True:
    threading.Thread(target=done.wait).start()
    n += 1
done.set()
if n > 6:
  print("ESCAPED")""",
  "memory": """
print("tried", flush=True)
kept = []
while True:
  kept.append(bytearray(1 << 20))""",
  "mmap": """
print("tried", flush=True)
kept = []
for _ in range(1024):
  kept.append(mmap.mmap(-1, 1 << 20))
  kept[-1][::4096] = b"x" * 256
print("ESCAPED")""",
  "hidden memory": """
syscall("memfd_create", b"x", 0)
syscall("memfd_secret", 0)
syscall("shmget", 0, 1 << 20, 0o1600)
syscall("msgget", 0, 0o1600)
syscall("mq_open", b"x", 0o102, 0o600, None)""",
  "disk": """
size = 0
with contextlib.suppress(OSError):
  for n in range(64):
    with open(str(n), "wb", 0) as file:
      size += file.write(bytes(1 << 20))
if size > 4 << 20:
  print("ESCAPED")""",
  "deleted files": """
kept, size = [], 0
with contextlib.suppress(OSError):
  for n in range(32):
    kept.append(open("x", "wb", 0))
    os.unlink("x")
    size += kept[-1].write(bytes(1 << 20))
if size > 4 << 20:
  print("ESCAPED")""",
  "sparse file": """
attempt(lambda: print("ESCAPED", os.truncate(os.open("x", 66), 1 << 40)))
attempt(lambda: print("ESCAPED", os.posix_fallocate(
    os.open("y", 66), 0, 1 << 30)))""",
  "small files": """
for n in range(5000):
  open(f"{n}", "w").close()""",
  "open files": """
attempt(lambda: [open("/dev/null") for _ in range(999)].append("ESCAPED"))
kept = []
with contextlib.suppress(OSError):
  while True:
    kept.append(os.dup(1))
if len(kept) > 59:
  os.write(1, b"ESCAPED")
os.closerange(3, 59)""",
  "huge output": 'print("tried" + "x" * 50_000_000)',
  "endless output": """
print("tried", flush=True)
while True:
  os.write(2, b"x" * 65536)""",
  "sleep": 'print("tried", flush=True); time.sleep(60)',
  "busy loop": 'print("tried", flush=True)\nwhile True: pass',
  "ignored signals": """
for number in range(1, 65):
  with contextlib.suppress(OSError, ValueError):
    signal.signal(number, signal.SIG_IGN)
print("tried", flush=True)
while True: pass""",
  "busy processes": """
print("tried", flush=True)
os.fork()
os.fork()
while True:
  pass""",
  "closed streams": """
print("tried", flush=True)
os.closerange(0, 59)
time.sleep(60)""",
  "stdin": """
while sys.stdin.buffer.read(65536): pass
os.close(0)
attempt(os.open, "/dev/stdin", os.O_RDWR)
attempt(os.write, 0, b"x")""",
  "daemon": """
if not os.fork():
  os.setsid()
  if not os.fork():
    os.closerange(0, 59)
    time.sleep(60)
  os._exit(0)""",
  "time bomb": """
if not os.fork():
  os.setsid()
  time.sleep(0.3)
  write(HOST["canary"])
  attempt(socket.create_connection, ("127.0.0.1", HOST["ipv4"]), 1)
  time.sleep(60)""",
  "stopped process": """
print("tried", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)""",
}
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


def _program(code: str, values: dict[str, str | int]) -> str:
  return f"HOST = {values!r}\nNUMBERS = {NUMBERS!r}\n{PRELUDE}\n{code}\n"


async def _run_all(host: Host) -> None:
  """Runs the escapes, three at a time, and a few one by one."""
  few = asyncio.Semaphore(3)

  async def run(name: str) -> None:
    code = _program(ESCAPES[name], host.values) + 'print("tried", flush=True)'
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


@pytest.fixture(scope="module", autouse=True)
def _bubblewrap():
  """Skips the file where this machine cannot have a sandbox at all."""
  if not (bwrap := shutil.which("bwrap")):
    pytest.skip("there is no bwrap: apt-get install bubblewrap")
  trial = [bwrap, "--unshare-all", "--unshare-user", "--ro-bind", "/", "/"]
  if subprocess.run([*trial, "true"], check=False).returncode:
    pytest.skip("this machine does not permit user namespaces")


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
  code = _program(ESCAPES[name].replace("write", "str"), host.values | patched)
  done = subprocess.run(
    [sys.executable, "-c", code],
    cwd=tmp_path,
    capture_output=True,
    text=True,
    check=True,
  )
  assert host.secret in done.stdout


def test_a_caller_that_is_cancelled_leaves_no_process():
  async def look():
    run = asyncio.create_task(BOX.run("import time; time.sleep(60)"))
    async with asyncio.timeout(10):
      while not (found := _processes()):
        await asyncio.sleep(0.02)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
      await run
    return found, _processes()

  found, left = asyncio.run(look())
  assert found
  assert not left


def test_a_caller_that_is_cancelled_at_any_time_leaves_no_process():
  async def cancel(after_s):
    run = asyncio.create_task(BOX.run("import time; time.sleep(60)"))
    await asyncio.sleep(after_s)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
      await run

  async def cancel_many():
    # Together they start slowly, so that many are cancelled in the middle.
    async with asyncio.timeout(30):
      await asyncio.gather(*(cancel(0.01 * n) for n in range(60)))
    return _processes()

  assert not asyncio.run(cancel_many())


def run(code, stdin="", **limits):
  """Runs a program in a sandbox with other limits."""
  return asyncio.run(dataclasses.replace(BOX, **limits).run(code, stdin))


@pytest.mark.parametrize(
  ("code", "status", "exit_code", "stdout"),
  [
    ("print(input()[::-1])", "ok", 0, "cba\n"),
    ("print('\u00fc\u4e2d')", "ok", 0, "\u00fc\u4e2d\n"),
    ("import sys; sys.stdout.buffer.write(b'\\xff')", "ok", 0, "\ufffd"),
    ("print(1); 1 / 0", "error", 1, "1\n"),
    ("print(", "error", 1, ""),
    ("'\ud800'", "error", 1, ""),
    ("\0", "error", 1, ""),
    ("", "ok", 0, ""),
    ("raise SystemExit(7)", "error", 7, ""),
    ("import os; os.abort()", "error", 134, ""),  # 128 + SIGABRT
    ("x = 'x' * 10**10", "memory", 1, ""),
    ("print('x' * 20000)", "output", None, "x" * 16384),
  ],
)
def test_a_result_says_how_the_program_ended(code, status, exit_code, stdout):
  result = run(code, "abc")
  assert (result.status, result.code) == (status, exit_code)
  assert result.stdout == stdout


def test_a_program_may_use_packages_threads_and_files():
  code = """
import numpy, pathlib, tempfile, threading
with tempfile.NamedTemporaryFile() as file:
  pathlib.Path(file.name).write_text("x")
thread = threading.Thread(target=lambda: print(numpy.arange(4).sum()))
thread.start()
thread.join()
"""
  assert run(code, memory_mib=512, cpu_s=10).stdout == "6\n"


def test_equal_programs_print_the_same():
  code = "print(list({str(n) for n in range(50)}))"
  assert run(code).stdout == run(code).stdout


def test_a_program_need_not_read_its_input():
  assert run("print(1)", "x" * 10_000_000).status == "ok"


def test_a_program_finds_nothing_of_the_one_before():
  code = "import os; print(os.path.exists('x')); open('x', 'w').close()"
  assert run(code).stdout == run(code).stdout == "False\n"


def test_without_bubblewrap_nothing_runs(monkeypatch, tmp_path):
  monkeypatch.setenv("PATH", str(tmp_path))
  with pytest.raises(sandbox.SandboxError, match="apt-get install bubblewrap"):
    run("print(1)")


def test_where_namespaces_are_not_permitted_nothing_runs(monkeypatch, tmp_path):
  bwrap = tmp_path / "bwrap"
  bwrap.write_text("#!/bin/sh\necho 'bwrap: No permissions' >&2\nexit 1\n")
  bwrap.chmod(0o755)
  monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
  with pytest.raises(sandbox.SandboxError, match="No permissions"):
    run("print(1)")


def test_a_machine_whose_calls_are_not_known_is_refused(monkeypatch):
  monkeypatch.setattr(sandbox.platform, "machine", lambda: "riscv64")
  sandbox._filter.cache_clear()
  with pytest.raises(sandbox.SandboxError, match="riscv64"):
    run("print(1)")


@pytest.mark.parametrize(
  "limits",
  [{"wall_s": 0}, {"wall_s": math.nan}, {"memory_mib": 8}, {"processes": 0}],
)
def test_limits_that_no_program_could_meet_are_refused(limits):
  with pytest.raises(ValueError, match=r"sandbox \w+=.*: use"):
    sandbox.Sandbox(**limits)
