"""Masks, which leave rollouts or decisions out."""
