"""Trajectories, packed batches and where each segment comes from."""
