"""Asks for known vulnerabilities of what requirements.lock has: make audit.

  python -m scripts.audit PIP_AUDIT

Exits with 1 if one is known. A service that is not there, or knows none of the
packages, as a mirror does, is no failure: that is said.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

_LATEST_S = 300


def main() -> None:
  """Runs pip-audit, prints what it found and exits."""
  try:
    result = subprocess.run(
      [
        sys.argv[1],
        *("--requirement", "requirements.lock"),
        *("--require-hashes", "--disable-pip"),
        *("--format", "json", "--progress-spinner", "off"),
      ],
      capture_output=True,
      text=True,
      timeout=_LATEST_S,
    )
    report = json.loads(result.stdout)
  except (subprocess.TimeoutExpired, json.JSONDecodeError):
    sys.stderr.write("No service of vulnerabilities to be had: not audited.\n")
    return
  text, is_bad = told(report)
  print(text)
  sys.exit(is_bad)


def told(report: Mapping[str, Any]) -> tuple[str, bool]:
  """Returns a report of pip-audit in words, and whether a package is bad."""
  packages = report["dependencies"]
  audited = [one for one in packages if "vulns" in one]
  if not audited:
    return (
      f"None of {len(packages)} packages is known to the service of "
      "vulnerabilities: not audited.",
      False,
    )
  lines = [f"{len(audited)} of {len(packages)} packages audited"]
  for one in audited:
    for found in one["vulns"]:
      fixed = ", ".join(found["fix_versions"]) or "no version yet"
      lines.append(
        f"{one['name']} {one['version']}: {found['id']}, fixed by {fixed}"
      )
  return "\n".join(lines), len(lines) > 1


if __name__ == "__main__":
  main()
