"""Skips where this machine cannot have a sandbox."""

import shutil
import subprocess

import pytest


@pytest.fixture(scope="module", autouse=True)
def _bubblewrap():
  """Skips where this machine cannot have a sandbox at all."""
  if not (bwrap := shutil.which("bwrap")):
    pytest.skip("there is no bwrap: apt-get install bubblewrap")
  trial = [bwrap, "--unshare-all", "--unshare-user", "--ro-bind", "/", "/"]
  if subprocess.run([*trial, "true"], check=False).returncode:
    pytest.skip("this machine does not permit user namespaces")
