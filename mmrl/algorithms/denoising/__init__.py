"""Objectives of denoisers that need no chain of denoising steps, or its gradient."""
