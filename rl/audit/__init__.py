"""The event log, the token ledger and the invariants of a schedule."""
