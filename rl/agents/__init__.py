"""Sessions of agents that are served over HTTP."""
