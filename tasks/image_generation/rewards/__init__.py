"""Rewards for the images of the shipped prompts."""
