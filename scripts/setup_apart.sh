#!/bin/sh
# Makes .venv-NAME, an environment apart from .venv, for `make NAME`.
#
#   scripts/setup_apart.sh backends|interop|sglang|xm
set -eu
cd "$(dirname "$0")/.."

name=${1-}
venv=.venv-$name
first=''
case $name in
  backends)
    set -- --editable '.[envs,hf,processes,pytest,ray,slurm]' \
      --constraint .venv/pins
    ;;
  interop)
    # The oldest first: that is the one for which every wheel exists.
    first=python3.11
    set -- 'torch==2.13.0' 'transformers==5.23.*' 'peft==0.21.*' safetensors \
      numpy
    ;;
  sglang)
    # sglang-jax has no release for an older one.
    first=python3.12
    # Of the tests' needs those of an engine's: sglang-jax pins an older
    # pydantic than others take. The versions that they agree on, lest pip tries
    # all of jax from the newest.
    set -- 'jax==0.8.3' 'flax==0.12.6' 'optax==0.2.8' \
      'orbax-checkpoint==0.12.8' 'numpy==2.2.6' \
      --editable '.[sglang,hf,serve,constrained,rewards,processes,pytest]'
    ;;
  xm)
    set -- --editable '.[envs,xm,pytest]'
    ;;
  *)
    echo "usage: $0 backends|interop|sglang|xm" >&2
    exit 2
    ;;
esac

install() {
  if [ "$name" = xm ]; then
    # pip takes ten minutes and more to choose among the clients of a cloud, and
    # with the versions of the lock it does not end.
    "$venv/bin/python" -m pip install --no-input uv &&
      "$venv/bin/python" -m uv pip install --python "$venv/bin/python" "$@"
  else
    "$venv/bin/python" -m pip install --no-input "$@"
  fi
}

python=$(PYTHON=${PYTHON:-$first} scripts/find_python.sh 2>/dev/null) ||
  python=$(scripts/find_python.sh)
if [ "$name" = sglang ] &&
  ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] < (3, 12))'; then
  echo "sglang-jax needs Python 3.12 or 3.13; $python is older." >&2
  exit 1
fi
echo "Making $venv with $python; this takes minutes ..."
rm -rf "$venv"
"$python" -m venv "$venv"
if ! install "$@" >"$venv/setup.log" 2>&1; then
  tail -n 20 "$venv/setup.log" >&2
  echo "Set-up failed: see above, or all of $venv/setup.log." >&2
  exit 1
fi
touch "$venv/ready"
