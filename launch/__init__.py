"""The commands that a user types, one a file."""
