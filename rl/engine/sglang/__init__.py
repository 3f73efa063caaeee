"""sglang-jax as a decode engine."""
