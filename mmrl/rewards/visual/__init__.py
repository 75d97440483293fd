"""Rewards of images and videos, and of answers about them."""
