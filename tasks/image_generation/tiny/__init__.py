"""Small image models, built in code."""
