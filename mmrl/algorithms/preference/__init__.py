"""Preference losses of pairs and of whole groups."""
