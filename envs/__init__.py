"""Environments and rewards: host Python, text in and text out, no jax."""
