"""Measurements: quantities of a step's rollouts that methods need, one class each."""
