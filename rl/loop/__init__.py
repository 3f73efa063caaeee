"""The loop of a run: coordinator, producer, progress, warm start."""
