"""Package metadata: what Twinmesh needs, and what each extra adds.

requirements.lock pins one tested resolution of all of it; `make lock` writes
that file again. The ranges here are for projects that depend on this one.
"""

import pathlib

import setuptools
from setuptools.command import build_py

JAX = ">=0.8.3,<0.13"
ENVS = ["textarena>=0.7.3", "gymnasium>=1.0"]
# One of its dependencies must be compiled, so it is no part of "all".
REASONING = ["reasoning-gym>=0.1.25"]
# A client of HTTP: rewards computed by servers, and judges.
REWARDS = ["math-verify>=0.8", "jsonschema>=4.23", "httpx2>=2.5"]
MINIGRID = ["minigrid>=3.0"]
# Rewards as tasks of Ray, and processes on its hosts: large, so it is no part
# of "all".
RAY = ["ray>=2.40"]
# Processes as jobs of Slurm.
SLURM = ["submitit>=1.5"]
# 600 MB with clients of clouds, for a launch script.
XM = ["xmanager>=0.7.1,<0.9"]
# The WebSocket of OpenEnv servers.
OPENENV = ["websockets>=15"]
# Engines in processes of their own.
PROCESSES = ["websockets>=15", "msgpack>=1.0"]
# Methods of a class as tools.
TOOLS = ["pydantic>=2.10"]
# Tokenizers of published models; it brings a client of the hub, and with that a
# dozen packages.
HF = ["tokenizers>=0.21"]
# A client of the API, to try an environment with a served model.
OPENAI = ["openai>=1.60"]
# Rows of Parquet files as tasks; JSON lines need nothing.
PARQUET = ["pyarrow>=17"]
SERVE = ["starlette>=0.40", "uvicorn>=0.30"]
# Answers held to a JSON schema or to a call, by a mask of ids.
CONSTRAINED = ["llguidance>=1.8,<2"]
# Servers of tools that speak the Model Context Protocol.
MCP = ["mcp>=2.3,<3"]
# Services that show metrics of many runs; neither is part of "all".
WANDB = ["wandb>=0.19"]
MLFLOW = ["mlflow-skinny>=3.0"]
PYTEST = ["pytest>=8.0", "pytest-xdist>=3.6", "beartype>=0.19"]
TEST = [
  *PYTEST,
  # Searches of the seams: make fuzz.
  "hypothesis>=6.130",
  *HF,
  *OPENAI,
  "anthropic>=2.0",
  *SERVE,
  *ENVS,
  *MINIGRID,
  *OPENENV,
  *PROCESSES,
  *REWARDS,
  *TOOLS,
  *MCP,
  *PARQUET,
  *CONSTRAINED,
]
# Of python 3.12 and jax 0.8 or 0.10: an environment of its own, which is why
# it is no part of "all". scripts/setup_apart.sh makes one.
SGLANG = ["sglang-jax==0.0.2"]
LINT = ["ruff>=0.12", "pyright[nodejs]>=1.1.400"]
# It is in the lock, so that what builds the package is as fixed as the rest.
BUILD = ["setuptools>=77"]
# Pictures of notebooks, and what executes them: make notebooks.
NOTEBOOKS = [
  "matplotlib>=3.9",
  "jupytext>=1.16",
  "nbclient>=0.10",
  "ipykernel>=6.29",
]
DOCS = ["mkdocs-material>=9.6", "mkdocstrings[python]>=1.0"]

TOPS = ("configs", "envs", "launch", "models", "rl", "twinmesh")


class BuildWithMetrics(build_py.build_py):
  """Puts docs/metrics.md beside the report, which explains metrics by it."""

  def run(self):
    """Builds the packages, and adds the page unless they are used in place."""
    super().run()
    if not self.editable_mode:
      target = pathlib.Path(self.build_lib, "launch", "report", "metrics.md")
      self.copy_file("docs/metrics.md", str(target))


setuptools.setup(
  name="twinmesh",
  version="0.1.0",
  description="Reinforcement learning of language-model agents in JAX.",
  license="Apache-2.0",
  author="The Twinmesh Authors",
  python_requires=">=3.11,<3.14",
  package_dir={"": "."},
  packages=[
    package
    for top in TOPS
    for package in setuptools.find_packages(include=[top, f"{top}.*"])
  ],
  package_data={
    **{top: ["py.typed"] for top in TOPS},
    "configs": ["py.typed", "*.jsonl"],
    "launch.report": ["static/*"],
    "models.hf": ["tiny/*"],
    "twinmesh": ["py.typed", "template/*.txt"],
  },
  cmdclass={"build_py": BuildWithMetrics},
  entry_points={"console_scripts": ["twinmesh = twinmesh.command:main"]},
  install_requires=[
    f"jax{JAX}",
    # 0.12.6 works with jax 0.8.3, and 0.12.12 with jax 0.12.
    "flax>=0.12.6,<0.13",
    "optax>=0.2.6",
    "orbax-checkpoint>=0.11.30",
    "grain>=0.2.14",
    # Chat templates of models.
    "jinja2>=3.1.6",
    "absl-py>=2.1",
    "numpy>=2.0",
    "jaxtyping>=0.3.2",
    "rich>=13.7",
    "tensorboardX>=2.6.2",
    "safetensors>=0.5",
    # Manifests for Kubernetes.
    "pyyaml>=6.0",
  ],
  extras_require={
    "envs": ENVS,
    "reasoning": REASONING,
    "minigrid": MINIGRID,
    "openenv": OPENENV,
    "processes": PROCESSES,
    "rewards": REWARDS,
    "ray": RAY,
    "slurm": SLURM,
    "xm": XM,
    "tools": TOOLS,
    "mcp": [*TOOLS, *MCP],
    "hf": HF,
    "openai": OPENAI,
    "parquet": PARQUET,
    "serve": SERVE,
    "constrained": CONSTRAINED,
    "wandb": WANDB,
    "mlflow": MLFLOW,
    "sglang": SGLANG,
    # Gigabytes of drivers that only an accelerator's machine has a use for, so
    # they are no part of "all".
    "cuda": [f"jax[cuda12]{JAX}"],
    "tpu": [f"jax[tpu]{JAX}"],
    "pytest": PYTEST,
    "test": TEST,
    "lint": LINT,
    "docs": DOCS,
    "notebooks": NOTEBOOKS,
    "all": [*TEST, *LINT, *DOCS, *NOTEBOOKS, *BUILD],
  },
)
