"""Surrogate objectives of the policy ratio."""
