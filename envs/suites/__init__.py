"""Environments from packages that carry their tasks."""
