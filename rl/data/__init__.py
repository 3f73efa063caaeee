"""Trajectories, packed batches and the origin of each segment."""
