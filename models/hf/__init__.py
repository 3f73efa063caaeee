"""Hugging Face checkpoints: configuration, parameters, export."""
