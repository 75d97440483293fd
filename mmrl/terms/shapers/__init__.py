"""Shapers, which change advantages."""
