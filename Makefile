# Needs a Python 3.11, 3.12 or 3.13 and the network once; `make help` says more.

.PHONY: help setup train test test-slow test-all soak fuzz audit lint docs notebooks interop agents sglang reasoning bfcl openenv backends xm trackers gpu-programs wheels lock clean

python = .venv/bin/python
ARGS =

help:
	@echo 'make train   train on guess-a-number; results in runs/guess_number_moe'
	@echo 'make test    run the tests but for the slow ones'
	@echo 'make test-slow  run the slow ones; make test-all runs both'
	@echo 'make soak    hurt runs at random moments and let them go on'
	@echo 'make fuzz    search the seams for examples that fail, with new ones'
	@echo 'make lint    check style and types'
	@echo 'make docs    build the documentation into site/'
	@echo 'make notebooks  execute notebooks/*.py, keep them as .ipynb'
	@echo 'make interop load what we export in transformers, in an environment apart'
	@echo 'make agents  play agents of other packages, in an environment apart'
	@echo 'make sglang  run the tests of sglang-jax as an engine, in an environment apart'
	@echo 'make reasoning  add reasoning-gym to .venv (takes a C compiler), run its tests'
	@echo 'make bfcl    add bfcl-eval to .venv without its dependencies, run its tests'
	@echo 'make openenv play a server of the package openenv, in an environment apart'
	@echo 'make backends  run engines and sweeps by Ray and Slurm, in one apart'
	@echo 'make xm      run sweeps by XManager, in an environment apart'
	@echo 'make trackers add the trackers to .venv, run their tests'
	@echo 'make gpu-programs  compile for a GPU that is not there, with the plugin apart'
	@echo 'make setup   make .venv; the commands above do so when needed'
	@echo 'make audit   ask for known vulnerabilities of what is locked'
	@echo 'make wheels  work with a wheel on each Python, with the oldest jax and the newest'
	@echo 'make lock    resolve setup.py again into requirements.lock'
	@echo 'make clean   remove environments and caches, keep runs/'
	@echo
	@echo 'ARGS is passed on:'
	@echo '  make train ARGS="--config.rounds=5 --workdir=runs/short"'
	@echo '  make test ARGS="tests/rl/algorithms -k losses"'
	@echo '  make test ROOM=rl/engine    its tests, and unit tests of its importers'
	@echo '  make soak ARGS="--minutes=60 --seed=1"'
	@echo '  make fuzz SECONDS=600 ARGS="-k settings"'
	@echo '  make lock ARGS=--upgrade'
	@echo 'PYTHON=/path/to/python chooses the Python that .venv is made with.'

setup: .venv/ready

.venv/ready: requirements.lock setup.py
	@scripts/setup.sh

train: .venv/ready
	@$(python) -m launch.train --config=configs/guess_number_moe.py \
	  --workdir=runs/guess_number_moe $(ARGS)

# Three at a time, because tests wait as well as compute; a file in one piece,
# because its tests share compiled programs. Files stay in the order of
# tests/conftest.py, which is long ones first.
pytest = $(python) -m pytest --numprocesses=3 --dist=loadfile \
  --no-loadscope-reorder

test: .venv/ready
	@$(pytest) -m 'not slow' $(if $(ROOM),--room=$(ROOM)) $(ARGS)

test-slow: .venv/ready
	@$(pytest) -m slow $(ARGS)

test-all: test test-slow

soak: .venv/ready
	@$(python) -m scripts.soak $(ARGS)

# Each search goes on for so long, with other examples each time, or those of a
# SEED in hexadecimal.
SECONDS = 60
fuzz: .venv/ready
	@TWINMESH_FUZZ=$(SECONDS) TWINMESH_FUZZ_SEED=$(SEED) $(pytest) \
	  -m hypothesis $(ARGS)

lint: .venv/ready
	@$(python) -m ruff check .
	@$(python) -m ruff format --check .
	@$(python) -m pyright

docs: .venv/ready
	@$(python) -m scripts.make_docs --check
	@NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --strict --quiet
	@echo "site/index.html; its search needs a server: $(python) -m http.server -d site"

notebooks: .venv/ready
	@$(python) -m scripts.make_notebooks $(ARGS)

# Apart: it needs other versions of packages than those that it audits.
.venv-audit/ready:
	@python=$$(scripts/find_python.sh) && $$python -m venv $(@D) && \
	  $(@D)/bin/python -m pip install --no-input --quiet 'pip-audit>=2.9'
	@touch $@

audit: .venv/ready .venv-audit/ready
	@$(python) -m scripts.audit .venv-audit/bin/pip-audit

.venv-interop/ready: scripts/setup_apart.sh
	@scripts/setup_apart.sh interop

interop: .venv/ready .venv-interop/ready
	@directory=$$(mktemp -d) && trap 'rm -rf "$$directory"' EXIT && \
	  $(python) scripts/check_interop.py write "$$directory" && \
	  .venv-interop/bin/python scripts/check_interop.py check "$$directory"

# Two, as they need different versions of openai.
.venv-agents/ready: package = openai-agents>=0.24
.venv-verifiers/ready: package = verifiers>=0.1.14,<0.2
.venv-agents/ready .venv-verifiers/ready:
	@python=$$(scripts/find_python.sh) && $$python -m venv $(@D) && \
	  $(@D)/bin/python -m pip install --no-input --quiet '$(package)'
	@touch $@

agents: .venv/ready .venv-agents/ready .venv-verifiers/ready
	@$(python) -m pytest tests/claims/test_agent_packages.py $(ARGS)

.venv-sglang/ready: scripts/setup_apart.sh setup.py
	@scripts/setup_apart.sh sglang

# A missing engine fails here, where the suite would otherwise skip it.
sglang: .venv/ready .venv-sglang/ready
	@TWINMESH_ENGINES=sglang .venv-sglang/bin/python -m pytest \
	  tests/rl/engine/test_contract.py tests/rl/engine/sglang $(ARGS)
	@TWINMESH_ENGINES=remote_sglang $(python) -m pytest \
	  tests/rl/engine/test_contract.py $(ARGS)

.venv/reasoning: .venv/ready
	@$(python) -m pip install --no-input --quiet --editable '.[reasoning]' \
	  --constraint .venv/pins
	@touch $@

# Slow ones, too: they hold every dataset against junk.
reasoning: .venv/reasoning
	@$(pytest) tests/envs/suites/test_reasoning*.py $(ARGS)

# Its dependencies, 6 GB with torch, are for other parts of it.
.venv/bfcl: .venv/ready
	@$(python) -m pip install --no-input --quiet --no-deps 'bfcl-eval>=2026.3'
	@touch $@

bfcl: .venv/bfcl
	@$(python) -m pytest tests/envs/suites/test_bfcl.py $(ARGS)

# SQLAlchemy and alembic are the database that a tracker is tested with.
.venv/trackers: .venv/ready
	@$(python) -m pip install --no-input --quiet --editable '.[wandb,mlflow]' \
	  sqlalchemy alembic --constraint .venv/pins
	@touch $@

trackers: .venv/trackers
	@$(python) -m pytest tests/rl/loop/test_trackers.py $(ARGS)

# The package's server and client, 400 MB; the client here needs neither.
.venv-openenv/ready: .venv/ready
	@$(python) -m venv .venv-openenv
	@.venv-openenv/bin/python -m pip install --no-input --quiet 'openenv>=0.10'
	@touch $@

openenv: .venv-openenv/ready
	@TWINMESH_OPENENV=.venv-openenv/bin/python $(python) -m pytest \
	  tests/envs/suites/test_openenv.py $(ARGS)

.venv-backends/ready: .venv/ready scripts/setup_apart.sh setup.py
	@scripts/setup_apart.sh backends

# Slow ones, too: runs whose workers and raylets are killed.
backends: .venv/ready .venv-backends/ready
	@.venv-backends/bin/python -m pytest tests/rl/backends \
	  tests/claims/test_backends_run.py tests/claims/test_laptop_to_pod.py \
	  tests/launch/test_sweep.py \
	  -k 'ray or slurm or laptop' $(ARGS)

.venv-xm/ready: .venv/ready scripts/setup_apart.sh setup.py
	@scripts/setup_apart.sh xm

xm: .venv/ready .venv-xm/ready
	@TWINMESH_XMANAGER=.venv-xm/bin/xmanager .venv-xm/bin/python -m pytest \
	  tests/rl/backends tests/launch/test_sweep.py tests/launch/test_xm.py \
	  -k xm $(ARGS)

# jax's plugin, 600 MB, and what assembles programs; nothing of it needs a GPU.
.venv-cuda/ready: .venv/ready
	@version=$$($(python) -c 'import jaxlib; print(jaxlib.__version__)') && \
	  rm -rf .venv-cuda && $(python) -m pip install --no-input --quiet --no-deps \
	  --target .venv-cuda "jax-cuda12-plugin==$$version" \
	  "jax-cuda12-pjrt==$$version" nvidia-cuda-nvcc-cu12
	@touch $@

gpu-programs: .venv/ready .venv-cuda/ready
	@PYTHONPATH=.venv-cuda $(python) -m pytest tests/claims/test_gpu_programs.py \
	  $(ARGS)

PYTHONS =
wheels: .venv/ready
	@$(python) -m scripts.try_wheel $(PYTHONS:%=--python=%) $(ARGS)

lock: .venv/ready
	@$(python) -m pip install --quiet --disable-pip-version-check uv
	@$(python) -m uv pip compile --quiet setup.py --universal \
	  --python-version 3.11 --extra all --output-file requirements.lock \
	  --annotation-style line --generate-hashes \
	  --custom-compile-command 'make lock' $(ARGS)

clean:
	@rm -rf .venv .venv-audit .venv-interop .venv-agents .venv-verifiers .venv-sglang .venv-openenv .venv-backends .venv-xm .venv-cuda .pytest_cache .ruff_cache build dist site *.egg-info
	@find . -name __pycache__ -prune -exec rm -rf {} +
