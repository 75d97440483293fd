"""Small image models, made in code."""
