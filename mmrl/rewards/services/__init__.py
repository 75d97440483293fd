"""Rewards in separate processes and behind HTTP."""
