#!/bin/sh
# Makes .venv-xm, with xmanager and what a run needs, for `make xm`.
set -eu
cd "$(dirname "$0")/.."

python=$(scripts/find_python.sh)
echo "Making .venv-xm with $python; this takes minutes ..."
rm -rf .venv-xm
"$python" -m venv .venv-xm
# pip takes ten minutes and more to choose among the clients of a cloud, and with
# the versions of the lock it does not end.
if ! { .venv-xm/bin/python -m pip install --no-input uv &&
  .venv-xm/bin/python -m uv pip install --python .venv-xm/bin/python \
    --editable '.[envs,xm,pytest]'; } >.venv-xm/setup.log 2>&1; then
  tail -n 20 .venv-xm/setup.log >&2
  echo "Set-up failed: see above, or all of .venv-xm/setup.log." >&2
  exit 1
fi
touch .venv-xm/ready
