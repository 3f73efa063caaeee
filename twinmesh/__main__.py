"""Runs the command `twinmesh` as `python -m twinmesh`."""

from twinmesh import command

if __name__ == "__main__":
  command.main()
