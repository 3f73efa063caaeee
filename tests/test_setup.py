"""The way from a fresh clone to an environment, and what is put into it."""

import importlib.metadata
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from packaging import requirements, utils

from scripts import audit, make_docs_licences

ROOT = pathlib.Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"

# Bodies of programs that stand in for a Python.
REAL = f'exec "{sys.executable}" "$@"'
NOISY = f'echo "a shim that talks"; {REAL}'
BROKEN_SHIM = 'echo "pyenv: python: command not found" >&2; exit 127'
WITHOUT_ENSUREPIP = f"""exec "{sys.executable}" -c '
import sys
sys.modules["ensurepip"] = None
exec(sys.argv[1])' "$2" """


def as_version(version: str) -> str:
  """Returns a program that claims a version and, when taken, says which."""
  return f"""exec "{sys.executable}" -c '
import sys
sys.version_info = tuple(map(int, "{version}".split(".")))
sys._base_executable = "Python {version}"
exec(sys.argv[1])' "$2" """


def program(path: pathlib.Path, body: str) -> pathlib.Path:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(f"#!/bin/sh\n{body}\n")
  path.chmod(0o755)
  return path


@pytest.fixture
def find(tmp_path):
  """Returns a function that looks for a Python where only some exist."""

  def find(on_path: dict[str, str], **variables):
    for name, body in on_path.items():
      program(tmp_path / "bin" / name, body)
    return subprocess.run(
      ["/bin/sh", SCRIPTS / "find_python.sh"],
      env={"PATH": f"{tmp_path}/bin", "HOME": str(tmp_path), **variables},
      capture_output=True,
      text=True,
    )

  return find


def found(result) -> str:
  assert result.returncode == 0, result.stderr
  return result.stdout.strip()


def refused(result) -> str:
  assert result.returncode == 1
  assert result.stdout == ""
  return result.stderr


def this_python() -> str:
  return getattr(sys, "_base_executable", sys.executable)


@pytest.mark.process
@pytest.mark.parametrize(
  "unusable",
  [BROKEN_SHIM, as_version("3.10.13"), as_version("3.14.0"), WITHOUT_ENSUREPIP],
  ids=["shim", "old", "new", "no ensurepip"],
)
def test_a_python_that_will_not_do_is_passed_over(find, unusable):
  assert found(find({"python3.12": unusable, "python3": REAL})) == this_python()


@pytest.mark.process
def test_3_12_is_preferred_and_the_answer_is_what_lies_behind_the_name(find):
  programs = {f"python3.{n}": as_version(f"3.{n}.0") for n in (11, 12, 13)}
  assert found(find(programs)) == "Python 3.12.0"


@pytest.mark.process
def test_a_shim_may_talk_before_it_runs(find):
  assert found(find({"python3": NOISY})) == this_python()


@pytest.mark.process
def test_versions_of_pyenv_are_found_although_none_is_selected(find, tmp_path):
  program(tmp_path / ".pyenv/versions/3.12.9/bin/python", REAL)
  assert found(find({"python3.12": BROKEN_SHIM})) == this_python()


@pytest.mark.process
def test_without_any_python_the_report_says_what_each_one_said(find):
  report = refused(
    find(
      {
        "python3.12": BROKEN_SHIM,
        "python3.13": WITHOUT_ENSUREPIP,
        "python3": as_version("3.10.13"),
        "uv": "exit 2",
      }
    )
  )
  assert "bin/python3.12: pyenv: python: command not found" in report
  assert "bin/python3.13: cannot make environments: " in report
  assert "bin/python3: is Python 3.10.13" in report
  assert "  python3.11: not found" in report
  assert "uv python find: found none" in report
  assert "apt install python3" in report


@pytest.mark.process
def test_a_python_that_was_asked_for_is_never_replaced(find, tmp_path):
  old = program(tmp_path / "old", as_version("3.10.13"))
  report = refused(find({"python3.12": REAL}, PYTHON=str(old)))
  assert f"{old}: is Python 3.10.13" in report
  report = refused(find({"python3.12": REAL}, PYTHON="python9"))
  assert "python9: not found" in report


@pytest.mark.process
def test_a_python_that_was_asked_for_comes_before_3_12(find):
  programs = {"python3.12": REAL, "mine": as_version("3.13.0")}
  assert found(find(programs, PYTHON="mine")) == "Python 3.13.0"


# Its environments hold this program again, so that set-up takes milliseconds;
# installing fails while there is a file named offline.
FAST_PYTHON = """case "$1 $2 $3" in
  "-c "*) echo "$0" ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip install")
    [ ! -e offline ] || { echo "no network"; exit 1; }
    case $* in *requirements.lock)
      for number in $(seq 60); do echo "Collecting package$number==1"; done
      echo "  Using cached package60-1-py3-none-any.whl"
      echo "Installing collected packages: package1, package2"
    esac
    ;;
esac"""


@pytest.fixture
def set_up(tmp_path):
  """Returns a function that runs set-up in a checkout without an .venv."""
  shutil.copytree(SCRIPTS, tmp_path / "scripts")
  (tmp_path / "requirements.lock").touch()
  python = program(tmp_path / "python", FAST_PYTHON)
  return lambda: subprocess.run(
    ["/bin/sh", tmp_path / "scripts/setup.sh"],
    env={"PATH": "/usr/bin:/bin", "PYTHON": str(python)},
    capture_output=True,
    text=True,
  )


@pytest.mark.process
def test_set_up_that_failed_says_why_and_starts_afresh(set_up, tmp_path):
  (tmp_path / "offline").touch()
  failed = set_up()
  assert failed.returncode == 1
  assert failed.stderr == (
    "no network\n"
    "Set-up failed at: the packages of requirements.lock. See above, or all of "
    ".venv/setup.log.\n"
    "Run the same command to try again.\n"
  )
  assert not (tmp_path / ".venv/ready").exists()

  (tmp_path / "offline").unlink()
  (tmp_path / ".venv/half-installed").touch()
  assert set_up().returncode == 0
  assert (tmp_path / ".venv/ready").exists()
  assert not (tmp_path / ".venv/half-installed").exists()


@pytest.mark.process
def test_set_up_says_its_steps_in_few_lines(set_up, tmp_path):
  done = set_up()
  assert done.stderr == ""
  assert done.stdout == (
    f"Making .venv with {tmp_path}/python; this takes minutes:\n"
    "  an empty environment ...\n"
    "  the packages of requirements.lock ...\n"
    "    25 packages found\n"
    "    50 packages found\n"
    "    60 packages found, installing them\n"
    "  Twinmesh itself ...\n"
    "  .venv is ready\n"
  )
  assert (
    "Collecting package7==1\n" in (tmp_path / ".venv/setup.log").read_text()
  )


@pytest.mark.process
def test_an_environment_that_cannot_be_made_is_said(set_up, tmp_path):
  program(tmp_path / "python", 'case $1 in -c) echo "$0" ;; *) exit 3 ;; esac')
  failed = set_up()
  assert failed.returncode == 1
  assert "Set-up failed at: an empty environment." in failed.stderr


@pytest.mark.process
def test_set_up_that_succeeded_is_updated_in_place(set_up, tmp_path):
  assert set_up().returncode == 0
  (tmp_path / ".venv/installed").touch()
  assert set_up().stdout.startswith("Updating")
  assert (tmp_path / ".venv/installed").exists()
  assert (tmp_path / ".venv/ready").exists()


def pins() -> dict[str, list[requirements.Requirement]]:
  """Returns the lines of the lock file by package."""
  result = {}
  for line in (ROOT / "requirements.lock").read_text().splitlines():
    if line and line[0] not in "# ":
      pin = requirements.Requirement(line.removesuffix(" \\"))
      result.setdefault(utils.canonicalize_name(pin.name), []).append(pin)
  return result


def needs(package: str, extras: frozenset[str] = frozenset()):
  """Yields what an installed package requires here, with some extras."""
  for line in importlib.metadata.requires(package) or []:
    requirement = requirements.Requirement(line)
    marker = requirement.marker
    if not marker or any(marker.evaluate({"extra": e}) for e in {"", *extras}):
      yield requirement


def all_needs(package: str, *extras: str) -> set[str]:
  """Returns the names of all packages that come with an installed one."""
  waiting, seen = [(package, frozenset(extras))], set()
  while waiting:
    if (current := waiting.pop()) not in seen:
      seen.add(current)
      waiting += [
        (utils.canonicalize_name(r.name), frozenset(r.extras))
        for r in needs(*current)
      ]
  return {name for name, _ in seen} - {package}


@pytest.fixture
def twinmesh():
  try:
    return importlib.metadata.distribution("twinmesh").name
  except importlib.metadata.PackageNotFoundError:
    pytest.skip("twinmesh is not installed; make test installs it")


@pytest.mark.process
def test_an_environment_apart_that_is_not_known_is_no_package_to_install():
  command = ["/bin/sh", SCRIPTS / "setup_apart.sh", "interp"]
  result = subprocess.run(command, capture_output=True, text=True)
  assert result.returncode == 2
  assert "backends|interop|sglang|xm" in result.stderr


def test_every_file_that_is_installed_has_a_hash():
  text = (ROOT / "requirements.lock").read_text()
  # A package, its hashes, and a comment: where it comes from.
  entries = re.split(r"^(?=[a-z])", text, flags=re.MULTILINE)[1:]
  assert len(entries) == sum(map(len, pins().values()))
  for entry in entries:
    hashes = re.findall(r"^ +--hash=sha256:[0-9a-f]{64}( \\)?$", entry, re.M)
    assert hashes, entry


@pytest.mark.process
def test_versions_without_hashes_are_kept_for_what_is_added(set_up, tmp_path):
  lock = "a-b==1.0 ; sys_platform != 'win32' \\\n    --hash=sha256:00\n"
  (tmp_path / "requirements.lock").write_text(f"# by hand\n{lock}    # via c\n")
  assert set_up().returncode == 0
  kept = (tmp_path / ".venv/pins").read_text()
  assert kept == "a-b==1.0 ; sys_platform != 'win32'\n"


@pytest.mark.parametrize(
  ("expression", "text", "classifiers", "licence"),
  [
    ("MIT", "BSD", ["License :: OSI Approved :: BSD License"], "MIT"),
    (
      None,
      "Apache 2.0",
      ["License :: OSI Approved", "License :: OSI Approved :: BSD License"],
      "BSD License",
    ),
    (None, "Apache 2.0\n\nAll of its text ...", [], "Apache 2.0"),
    (None, "x" * 61, ["Topic :: Games"], "unknown"),
    (None, None, [], "unknown"),
  ],
)
def test_a_licence_is_read_where_it_is_most_exact(
  expression, text, classifiers, licence
):
  found = make_docs_licences.of_metadata(expression, text, classifiers)
  assert found == licence


def test_the_licence_of_every_package_is_known_and_few_bind_what_uses_them():
  found = dict(make_docs_licences.listed())
  assert found.keys() == pins().keys()
  assert "unknown" not in found.values()
  # Of textarena's game of chess, and of what shows the grids of gymnasium: no
  # run loads them unless it plays these.
  bound = {name for name, licence in found.items() if "General" in licence}
  assert bound == {"chess", "pygame-ce"}


def test_a_report_of_vulnerabilities_says_what_was_audited():
  unknown = {"name": "a", "skip_reason": "not found"}
  sound = {"name": "b", "version": "1.0", "vulns": []}
  flaw = {"id": "CVE-1", "fix_versions": ["1.1"]}
  bad = {"name": "c", "version": "1.0", "vulns": [flaw]}
  text, is_bad = audit.told({"dependencies": [unknown, sound, bad]})
  assert text.splitlines() == [
    "2 of 3 packages audited",
    "c 1.0: CVE-1, fixed by 1.1",
  ]
  assert is_bad
  assert audit.told({"dependencies": [unknown, sound]}) == (
    "1 of 2 packages audited",
    False,
  )
  text, is_bad = audit.told({"dependencies": [unknown]})
  assert "None of 1 packages is known" in text
  assert not is_bad


def test_the_lock_pins_versions_and_nothing_else():
  for alternatives in pins().values():
    for pin in alternatives:
      assert re.fullmatch(r"==[\w.]+", str(pin.specifier))
      assert pin.url is None


def test_the_lock_is_within_the_ranges_of_the_package(twinmesh):
  locked = pins()
  for requirement in needs(twinmesh, frozenset(["all"])):
    for pin in locked[utils.canonicalize_name(requirement.name)]:
      (version,) = pin.specifier
      assert version.version in requirement.specifier, pin


def test_an_accelerator_brings_its_driver_and_all_extras_bring_none(twinmesh):
  for extra, name in (("cuda", "cuda12"), ("tpu", "tpu")):
    asked = [r for r in needs(twinmesh, frozenset([extra])) if name in r.extras]
    assert [r.name for r in asked] == ["jax"]
  drivers = [name for name in pins() if "cuda" in name or "tpu" in name]
  assert drivers == []


def test_the_package_brings_few_others(twinmesh):
  # Counted when this was written: 40; tokenizers, an extra, bring 12 more. With
  # the environments it is 61.
  assert len(all_needs(twinmesh)) <= 45
  assert len(all_needs(twinmesh, "envs")) <= 70
