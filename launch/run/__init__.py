"""One training process: wiring, display, files and signals."""
