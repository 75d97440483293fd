"""Rows in the shapes that people hold, as questions."""
