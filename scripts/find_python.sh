#!/bin/sh
# Prints the path of a Python that can make the environment.
#
# A name on PATH proves nothing: a version manager's shim may refuse to run, and
# a system's Python may lack venv. So every candidate is run, 3.12 first.
# PYTHON, when set, is the only candidate.
set -u

# The base of an active environment, which may be about to be deleted.
probe='
import sys
if not (3, 11) <= sys.version_info[:2] < (3, 14):
  sys.exit("is Python %d.%d.%d" % sys.version_info[:3])
try:
  import ensurepip, venv
except ImportError as error:
  sys.exit("cannot make environments: %s" % error)
print(getattr(sys, "_base_executable", None) or sys.executable)
'
newline='
'
tried=''

# Prints the interpreter behind $1 and exits, or notes why it will not do.
try() {
  if ! command -v "$1" >/dev/null 2>&1; then
    tried="$tried$newline  $1: not found"
    return
  fi
  if said=$("$1" -c "$probe" 2>&1 </dev/null); then
    # A shim may talk first: the answer is the last line.
    printf '%s\n' "${said##*"$newline"}"
    exit 0
  else
    status=$?
  fi
  said=${said%%"$newline"*}
  said=${said:-says nothing, exit status $status}
  tried="$tried$newline  $(command -v "$1"): $said"
}

if [ -n "${PYTHON:-}" ]; then
  try "$PYTHON"
  echo "PYTHON=$PYTHON will not do; need Python 3.11, 3.12 or 3.13:$tried" >&2
  exit 1
fi

for minor in 12 13 11; do
  try "python3.$minor"
  for path in "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/3.$minor".*/bin/python
  do
    [ -e "$path" ] && try "$path"
  done
done
if command -v uv >/dev/null 2>&1; then
  if path=$(uv python find --system '>=3.11,<3.14' 2>/dev/null); then
    try "$path"
  else
    tried="$tried$newline  uv python find: found none"
  fi
fi
try python3
try python

# Not cat: nothing but a shell is taken for granted here.
printf '%s\n' >&2 "No usable Python 3.11, 3.12 or 3.13. Tried:$tried

Get one, then run the same command again:
  Debian, Ubuntu   apt install python3 python3-venv
  Fedora           dnf install python3.12
  macOS            brew install python@3.12
  anywhere         uv python install 3.12, or pyenv install 3.12
One that is not on PATH: make PYTHON=/path/to/python3.12 ..."
exit 1
