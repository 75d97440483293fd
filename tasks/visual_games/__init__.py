"""Worlds seen as pictures and played over turns."""
