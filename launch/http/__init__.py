"""HTTP servers with bounds: on clients, connections, bodies and the log."""
