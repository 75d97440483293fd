"""Engines that a token policy may sample with, and the one definition of the distribution they sample from."""
