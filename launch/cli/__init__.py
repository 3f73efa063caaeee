"""Flags, config files, run directories and JAX set-up."""
