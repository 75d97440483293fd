"""Small models for questions, built in code."""
