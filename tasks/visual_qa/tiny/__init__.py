"""Small models for questions, made in code."""
