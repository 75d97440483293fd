"""Baselines, which are subtracted from rewards."""
