"""Accuracy on held-out prompts, protocols of evaluations, search at inference."""
