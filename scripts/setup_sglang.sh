#!/bin/sh
# Makes .venv-sglang, with sglang-jax and the jax it needs, for `make sglang`.
set -eu
cd "$(dirname "$0")/.."

# sglang-jax has no release for an older one.
python=$(PYTHON=${PYTHON:-python3.12} scripts/find_python.sh 2>/dev/null) ||
  python=$(scripts/find_python.sh)
if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] < (3, 12))'; then
  echo "sglang-jax needs Python 3.12 or 3.13; $python is older." >&2
  exit 1
fi
echo "Making .venv-sglang with $python; this takes minutes ..."
rm -rf .venv-sglang
"$python" -m venv .venv-sglang
# Of the tests' needs those of an engine's: sglang-jax pins an older pydantic
# than others take. The versions that they agree on, lest pip tries all of jax
# from the newest.
if ! .venv-sglang/bin/python -m pip install --no-input 'jax==0.8.3' \
  'flax==0.12.6' 'optax==0.2.8' 'orbax-checkpoint==0.12.8' 'numpy==2.2.6' \
  --editable '.[sglang,hf,serve,constrained,rewards,processes,pytest]' \
  >.venv-sglang/setup.log 2>&1; then
  tail -n 20 .venv-sglang/setup.log >&2
  echo "Set-up failed: see above, or all of .venv-sglang/setup.log." >&2
  exit 1
fi
touch .venv-sglang/ready
