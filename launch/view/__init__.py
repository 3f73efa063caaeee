"""One page over all runs of a directory, live while they train."""
