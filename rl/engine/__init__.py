"""Decode engines: the contract and its implementations."""
