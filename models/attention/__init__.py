"""Attention: masks and interchangeable backends."""
