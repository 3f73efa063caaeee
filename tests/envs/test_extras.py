"""Tests of the errors about optional packages."""

import pytest

from envs import extras


def test_a_missing_package_is_an_error_that_says_how_to_get_it():
  extras.require("json", "rewards", "reward x")  # No error.
  with pytest.raises(ValueError, match="reward x needs the package no_such: "):
    extras.require("no_such", "rewards", "reward x")
