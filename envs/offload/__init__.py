"""Rewards computed elsewhere: in processes, by an HTTP function, by Ray."""
