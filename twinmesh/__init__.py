"""The `twinmesh` command, and the check that all packages are Twinmesh's."""
