"""Offers this host to runs and sweeps: python -m launch.host --token_file=FILE.

  openssl rand -hex 32 > token && chmod 600 token
  python -m launch.host --listen=10.0.0.2:7000 --token_file=token --slots=8

and, on another host with the same checkout and a copy of the token,

  python -m launch.train ... \\
      --backend='addresses(at=["10.0.0.2:7000"], token_file="token")'

Who knows the token can run any code here as this user. Connections are not
encrypted: use a private network, or a tunnel of ssh.
"""

import pathlib
import signal
import sys
import threading

from absl import app
from absl import flags as absl_flags

from launch.cli import flags
from rl.backends import host
from rl.runtime import log_line

_LISTEN = absl_flags.DEFINE_string(
  "listen", "127.0.0.1:7000", "Address and port; port 0 takes a free one."
)
_TOKEN_FILE = absl_flags.DEFINE_string(
  "token_file", "token", "File with the token, for its user alone."
)
_SLOTS = absl_flags.DEFINE_integer(
  "slots", 1, "Programs at the same time.", lower_bound=1
)
_ONLY = absl_flags.DEFINE_string(
  "only",
  "",
  "Names of the programs that it takes: engine, learner, 'learner 0' for the"
  " first process of a learner, or run for runs of a sweep. All by default.",
)


@flags.command
def main() -> None:
  """Listens until Ctrl-C or SIGTERM, which end all programs: runs save first.

  Exits with 128 and the number of the signal.
  """
  with flags.exit_on_setting_error():
    token = host.read_token(pathlib.Path(_TOKEN_FILE.value))
    where = host.address_of(_LISTEN.value, "--listen")
    try:
      server = host.Host(where, token, _SLOTS.value, _ONLY.value)
    except OSError as error:
      raise ValueError(
        f"--listen={_LISTEN.value}: {error.strerror}; use an address of this "
        "host and a free port"
      ) from error
  log_line.tell(f"listening at {server.address}", sys.stdout)
  ended_by: list[int] = []

  def end(number: int, _: object) -> None:
    ended_by.append(number)
    # It waits for the loop that this interrupts.
    threading.Thread(target=server.shutdown).start()

  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, end)
  server.serve_forever(poll_interval=0.1)
  server.close()
  # Not 0: to a Job of Kubernetes a pod that is moved away would be complete.
  sys.exit(128 + ended_by[0])


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse_without_settings)
