"""Environments of turns: worlds and tools that answer what a policy says."""
