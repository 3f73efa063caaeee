"""The built-in engine: continuous batching over a paged KV cache."""
