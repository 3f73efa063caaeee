"""Language models in plain jax: no word of reinforcement learning in here."""
