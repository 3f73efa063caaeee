"""Reports and log checks of finished runs."""
