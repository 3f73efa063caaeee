"""Losses, advantages, corrections and the objective they form."""
