"""Objectives of denoisers that need no recorded chain of denoising steps, or that differentiate through it."""
