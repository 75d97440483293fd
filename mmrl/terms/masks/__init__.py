"""Masks of rollouts and decisions."""
