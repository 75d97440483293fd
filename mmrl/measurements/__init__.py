"""Measurements: what methods want to know of a step's rollouts, one class each."""
