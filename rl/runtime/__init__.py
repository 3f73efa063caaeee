"""Threads, deadlines, checkpoints, traces and the virtual clock."""
