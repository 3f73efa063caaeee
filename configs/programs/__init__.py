"""Programs that runs of `configs` start for their episodes."""
