"""One Python file a run: `get_config()` and, for sweeps, `sweep()`."""
