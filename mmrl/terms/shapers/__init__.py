"""Shapers of advantages."""
