"""Language models as Flax NNX modules, without reinforcement learning."""
