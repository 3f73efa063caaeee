"""Fakes and oracles for tests, shipped with the package."""
