#!/bin/sh
# Makes .venv-interop, with PyTorch and transformers, for `make interop`.
set -eu
cd "$(dirname "$0")/.."

# The oldest first: that is the one for which every wheel exists.
python=$(PYTHON=${PYTHON:-python3.11} scripts/find_python.sh 2>/dev/null) ||
  python=$(scripts/find_python.sh)
echo "Making .venv-interop with $python; this takes minutes ..."
rm -rf .venv-interop
"$python" -m venv .venv-interop
if ! .venv-interop/bin/python -m pip install --no-input 'torch==2.13.0' \
  'transformers==5.23.*' 'peft==0.21.*' safetensors numpy \
  >.venv-interop/setup.log 2>&1; then
  tail -n 20 .venv-interop/setup.log >&2
  echo "Set-up failed: see above, or all of .venv-interop/setup.log." >&2
  exit 1
fi
touch .venv-interop/ready
