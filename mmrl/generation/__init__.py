"""Engines that sample tokens, and the distribution that all of them sample from."""
