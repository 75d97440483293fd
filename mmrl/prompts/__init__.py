"""Samplers of prompts, and views of a prompt."""
