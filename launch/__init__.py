"""Command lines and processes: what a user types."""
