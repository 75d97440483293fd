"""Discrete diffusion models of tokens, masked (arXiv 2502.09992 and what followed) and uniform."""
