"""The coordinator, the producer and the state of a run."""
