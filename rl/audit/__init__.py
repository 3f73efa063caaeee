"""The event log, the token ledger and every invariant over them."""
