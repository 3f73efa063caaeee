#!/bin/sh
# Makes or updates .venv from requirements.lock; run by make when that changed.
#
# Every file that is installed must have a hash of the lock. The package itself
# is built by what that installed, since pip has no hashes for anything else.
# .venv/pins has the versions without hashes, for what is installed beside them.
#
# .venv/unfinished stands while this works and becomes .venv/ready at the end:
# a set-up that was interrupted starts afresh.
set -eu
cd "$(dirname "$0")/.."

usable() {
  [ ! -e .venv/unfinished ] &&
    PYTHON=.venv/bin/python scripts/find_python.sh &&
    .venv/bin/python -m pip --version
}

if usable >/dev/null 2>&1; then
  echo "Updating .venv ..."
  touch .venv/unfinished
else
  python=$(scripts/find_python.sh)
  echo "Making .venv with $python; this takes a minute or two ..."
  rm -rf .venv
  mkdir .venv
  touch .venv/unfinished
  "$python" -m venv .venv
fi

install() {
  .venv/bin/python -m pip install --no-input "$@" >>.venv/setup.log 2>&1
}

: >.venv/setup.log
if ! install --require-hashes --requirement requirements.lock ||
  ! install --no-deps --no-build-isolation --editable .; then
  tail -n 20 .venv/setup.log >&2
  echo "Set-up failed: see above, or all of .venv/setup.log." >&2
  echo "Run the same command to try again." >&2
  exit 1
fi
sed -n 's/^\([^ #][^\\]*\) \\$/\1/p' requirements.lock >.venv/pins
mv .venv/unfinished .venv/ready
