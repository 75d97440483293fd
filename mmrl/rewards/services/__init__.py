"""Rewards in processes of their own and behind addresses."""
