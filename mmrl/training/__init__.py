"""Preparation of scored rollouts for updates, balancing of ranks, and metrics."""
