"""Losses of pairs and of whole groups."""
