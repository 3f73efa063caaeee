"""Mixture-of-experts layers: routing and grouped matmuls."""
