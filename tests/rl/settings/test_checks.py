"""Checks that look through a whole tree of settings."""

import dataclasses

import pytest

from rl.settings import checks


@dataclasses.dataclass(frozen=True)
class Optional:
  package: str

  def validate_installed(self):
    raise ValueError(f"{self.package} is not installed")


@dataclasses.dataclass(frozen=True)
class Parts:
  parts: tuple[object, ...]


def test_a_missing_package_is_found_wherever_it_is_needed():
  checks.validate_installed(Parts((1, "a", Parts(()))))
  with pytest.raises(ValueError, match="x is not installed"):
    checks.validate_installed(Parts((Parts(()), Parts((Optional("x"),)))))
