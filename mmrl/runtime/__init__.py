"""Helpers for the process: devices, progress bars, files, images, seeds, and imports on first use."""
