"""Installs a wheel into clean environments, and works with it outside.

  python -m scripts.try_wheel
  python -m scripts.try_wheel --python=3.12 --jax=0.8.3

Each environment has one Python and one jax, and no extras but `pytest`. In an
empty directory each begins a project, tests it, trains, evaluates and checks
the run. A Python that is not installed is left out, with a line that says so.
The packages and megabytes of the core are printed, and bounded.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
JAXES = ("0.8.3", "newest")
MAX_PACKAGES = 45
MAX_MB = {
  # Its newest jax is 0.10.2, whose jaxlib has 20 MB more than that of 0.12: jax
  # and flax alone, with what they require, are 649 MB.
  "3.11": 675,
  "3.12": 650,
  "3.13": 650,
}
_OF_VENV = {"pip", "setuptools", "pkg_resources", "_distutils_hack"}
_SMALL = [
  "--config.rounds=2",
  "--config.warm_start=none",
  "--config.overlap.groups_per_round=8",
  "--config.evaluation.episodes=8",
]


def main() -> None:
  """Tries all environments; exits with 1 if one fails."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--python", choices=PYTHONS, action="append")
  parser.add_argument("--jax", action="append", metavar="VERSION")
  given = parser.parse_args()
  failed, tried = [], 0
  with tempfile.TemporaryDirectory() as scratch:
    wheel = build(pathlib.Path(scratch))
    for version in given.python or PYTHONS:
      python = find(version)
      if python is None:
        print(f"Python {version} is not installed here, and was not tried")
        continue
      for jax in given.jax or JAXES:
        tried += 1
        try:
          size = attempt(wheel, python, jax, MAX_MB[version])
          print(f"Python {version}, jax {jax}: {size}", flush=True)
        except (subprocess.CalledProcessError, AssertionError) as error:
          failed.append(f"Python {version}, jax {jax}")
          told = getattr(error, "stdout", "")
          print(f"{failed[-1]}: {error}\n{told}", file=sys.stderr, flush=True)
  if failed or not tried:
    sys.exit(f"failed: {', '.join(failed) or 'no Python was found'}")


def build(scratch: pathlib.Path) -> pathlib.Path:
  """Returns a wheel of the files that are or may be committed."""
  listing = run(
    *("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"),
    cwd=ROOT,
  )
  for name in filter(None, listing.split("\0")):
    if (ROOT / name).is_file():
      target = scratch / "source" / name
      target.parent.mkdir(parents=True, exist_ok=True)
      shutil.copy2(ROOT / name, target)
  pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
  run(*pip, "--wheel-dir", "wheels", "./source", cwd=scratch)
  (wheel,) = (scratch / "wheels").glob("twinmesh-*.whl")
  return wheel


def find(version: str) -> str | None:
  """Returns a Python of a version; None without one."""
  home = pathlib.Path.home()
  pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", home / ".pyenv"))
  names = [f"python{version}", *map(str, pyenv.glob(f"versions/{version}.*"))]
  for name in names:
    path = pathlib.Path(name, "bin", "python")
    program = str(path) if path.is_file() else name
    done = subprocess.run(
      ["/bin/sh", ROOT / "scripts/find_python.sh"],
      env={**os.environ, "PYTHON": program},
      capture_output=True,
      text=True,
    )
    if done.returncode == 0:
      return done.stdout.strip()
  return None


def attempt(
  wheel: pathlib.Path, python: str, jax: str, max_megabytes: int
) -> str:
  """Works with the wheel in a clean environment; returns its size in words.

  Raises:
    CalledProcessError: a command failed.
    AssertionError: it is too large, or its report explains nothing.
  """
  with tempfile.TemporaryDirectory() as scratch:
    run(python, "-m", "venv", "clean", cwd=scratch)
    programs = pathlib.Path(scratch, "clean", "bin")
    pip = [str(programs / "python"), "-m", "pip"]
    pinned = [] if jax == "newest" else [f"jax=={jax}"]
    run(*pip, "install", "--quiet", "--no-compile", wheel, *pinned, cwd=scratch)
    size = measured(programs, max_megabytes)
    run(*pip, "install", "--quiet", "pytest", cwd=scratch)
    twinmesh, work = str(programs / "twinmesh"), pathlib.Path(scratch, "work")
    work.mkdir()
    run(twinmesh, "new", "mine", cwd=work)
    work = work / "mine"
    run(str(programs / "python"), "-m", "pytest", "-q", cwd=work)
    config, where = "--config=config.py", "--workdir=runs/first"
    run(twinmesh, "try", config, cwd=work)
    run(twinmesh, "train", config, where, *_SMALL, cwd=work)
    run(twinmesh, "report", "--check=runs/first", cwd=work)
    run(twinmesh, "eval", "--run=runs/first", "--episodes=4", cwd=work)
    # The texts of metrics are in the wheel, and so are the configs.
    page = (work / "runs/first/report.html").read_text("utf-8")
    assert "Formula: " in page, "the report does not explain its metrics"
    shipped = "--config=configs/next_letter.py"
    run(twinmesh, "train", shipped, "--print_config", cwd=work)
  return size


def measured(programs: pathlib.Path, max_megabytes: int) -> str:
  """Returns the number of packages and their size, which are bounded.

  What an environment has before anything is installed does not count.
  """
  pip = [str(programs / "python"), "-m", "pip"]
  packages = json.loads(run(*pip, "list", "--format=json", cwd=programs))
  names = {one["name"] for one in packages} - _OF_VENV - {"twinmesh"}
  site = programs.parent / "lib"
  files = [file for file in site.rglob("*") if file.is_file()]
  own = [file for file in files if not _OF_VENV & {*file.parts}]
  megabytes = sum(file.stat().st_size for file in own) / 1e6
  listing = ", ".join(sorted(names))
  assert len(names) <= MAX_PACKAGES, f"more than {MAX_PACKAGES}: {listing}"
  assert megabytes <= max_megabytes, (
    f"{megabytes:.0f} MB, more than {max_megabytes}"
  )
  return f"{len(names)} packages, {megabytes:.0f} MB"


def run(*command: object, cwd: str | pathlib.Path) -> str:
  """Runs a program outside of the checkout; returns its output.

  Raises:
    CalledProcessError: it failed.
  """
  hidden = ("PYTHONPATH", "VIRTUAL_ENV", "XLA_FLAGS")
  return subprocess.run(
    [str(word) for word in command],
    cwd=cwd,
    env={k: v for k, v in os.environ.items() if k not in hidden},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT if "git" not in command else None,
    text=True,
    check=True,
  ).stdout


if __name__ == "__main__":
  main()
