"""Ways out of the sandbox: programs that try them, and print what they got."""

from envs.sandbox import bubblewrap

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
NUMBERS = bubblewrap._DENIED | {
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


def program(code: str, values: dict[str, str | int]) -> str:
  """Returns a whole program.

  Args:
    values: of the host, for HOST.
  """
  return f"HOST = {values!r}\nNUMBERS = {NUMBERS!r}\n{PRELUDE}\n{code}\n"
