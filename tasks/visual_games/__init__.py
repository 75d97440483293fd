"""Worlds seen as images and played over turns."""
