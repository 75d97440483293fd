"""Inputs with one planted fault each, and what a message has to name; written down before the check that names it."""
