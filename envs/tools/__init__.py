"""Environments whose methods or servers are tools of the policy."""
