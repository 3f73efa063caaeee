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

# Says what comes next, and remembers it for the case that it fails.
begin() {
  step=$1
  echo "  $step ..."
}

# Ends set-up with the last lines of the log.
fail() {
  tail -n 20 .venv/setup.log >&2
  echo "Set-up failed at: $step. See above, or all of .venv/setup.log." >&2
  echo "Run the same command to try again." >&2
  exit 1
}

# Installs into .venv; of what pip says, the log has all and the terminal little.
install() {
  found=0
  {
    .venv/bin/python -m pip install --no-input "$@" 2>&1 ||
      touch .venv/failed
  } | while IFS= read -r line; do
    printf '%s\n' "$line" >>.venv/setup.log
    case $line in
      "Collecting "*)
        found=$((found + 1))
        [ $((found % 25)) -ne 0 ] || echo "    $found packages found"
        ;;
      "Installing collected packages: "*)
        [ "$found" -eq 0 ] || echo "    $found packages found, installing them"
        ;;
    esac
  done
  [ ! -e .venv/failed ]
}

if usable >/dev/null 2>&1; then
  echo "Updating .venv:"
  touch .venv/unfinished
  : >.venv/setup.log
else
  python=$(scripts/find_python.sh)
  echo "Making .venv with $python; this takes minutes:"
  rm -rf .venv
  mkdir .venv
  touch .venv/unfinished
  begin "an empty environment"
  "$python" -m venv .venv >.venv/setup.log 2>&1 || fail
fi
rm -f .venv/failed

begin "the packages of requirements.lock"
install --require-hashes --requirement requirements.lock || fail
begin "Twinmesh itself"
install --no-deps --no-build-isolation --editable . || fail
sed -n 's/^\([^ #][^\\]*\) \\$/\1/p' requirements.lock >.venv/pins
mv .venv/unfinished .venv/ready
echo "  .venv is ready"
