"""Decode pools: placement, routing and weight synchronisation."""
