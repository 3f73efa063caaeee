"""The real coordinator in virtual time, over simulated engines."""
