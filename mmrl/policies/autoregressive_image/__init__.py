"""Autoregressive image generation: language models that write image tokens one after the other."""
