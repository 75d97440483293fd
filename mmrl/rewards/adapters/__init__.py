"""Rewards that were written for other libraries."""
