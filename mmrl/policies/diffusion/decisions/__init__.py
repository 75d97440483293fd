"""Decisions of a diffusion policy: steps of a chain, noise levels, or the last steps with their gradient."""
