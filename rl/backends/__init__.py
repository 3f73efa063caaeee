"""Backends: the hosts on which processes of a run or of a sweep start."""
