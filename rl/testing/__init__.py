"""Fakes and oracles that are shipped for tests."""
