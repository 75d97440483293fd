"""Denoising: sigma grids, transitions, windows, guidance, the chain that joins them, and the scorer of its samples."""
