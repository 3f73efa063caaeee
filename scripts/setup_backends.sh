#!/bin/sh
# Makes .venv-backends, with ray and submitit, for `make backends`.
set -eu
cd "$(dirname "$0")/.."

python=$(scripts/find_python.sh)
echo "Making .venv-backends with $python; this takes minutes ..."
rm -rf .venv-backends
"$python" -m venv .venv-backends
if ! .venv-backends/bin/python -m pip install --no-input \
  --editable '.[envs,hf,processes,pytest,ray,slurm]' --constraint .venv/pins \
  >.venv-backends/setup.log 2>&1; then
  tail -n 20 .venv-backends/setup.log >&2
  echo "Set-up failed: see above, or all of .venv-backends/setup.log." >&2
  exit 1
fi
touch .venv-backends/ready
