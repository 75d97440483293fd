"""Transforms of rewards before baseline and scale."""
