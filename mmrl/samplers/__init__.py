"""Denoising: sigma grids, transitions, windows, guidance, and the chain that joins them; only torch and kernels."""
