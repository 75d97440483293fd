"""Sums as text: a task without pictures, for models that only write."""
