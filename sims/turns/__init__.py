"""Environments of turns: games and tools that answer a policy's responses."""
