"""Denoising: sigma grids, transitions, windows, guidance and the chain that joins them. Imports only torch and kernels."""
