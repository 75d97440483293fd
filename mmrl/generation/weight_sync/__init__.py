"""Weights on their way from training into an engine, and the proof that they arrived."""
