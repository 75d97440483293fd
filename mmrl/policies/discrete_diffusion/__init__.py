"""Masked diffusion models of tokens: https://arxiv.org/abs/2502.09992 and what followed."""
