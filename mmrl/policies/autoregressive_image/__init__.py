"""Autoregressive image generation: language models that sample an image as a sequence of image tokens."""
