"""Sums as text: a task without images, for models that only write."""
