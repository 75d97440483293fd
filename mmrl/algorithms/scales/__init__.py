"""Scales, by which advantages are divided, and combinations of several rewards."""
