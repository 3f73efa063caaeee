"""The commands that a user types, one a file."""

import time

from twinmesh import top_packages

BEGAN_S = time.monotonic()
"""Reading of the clock when the command began, before it imports the rest."""

top_packages.check()
