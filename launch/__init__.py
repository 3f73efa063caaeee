"""The commands that a user types, one a file."""

import sys
import time

from twinmesh import extras, top_packages

BEGAN_S = time.monotonic()
"""Reading of the clock when the command began, before it imports the rest."""

if sys.argv[:1] == ["-m"]:  # So it is while Python looks for `launch.train`.
  extras.tell_instead_of_tracebacks()
top_packages.check()
