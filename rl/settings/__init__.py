"""Typed settings: overrides, JSON, suggestions and shared checks."""
