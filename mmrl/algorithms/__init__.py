"""Algorithms, one file each: their settings, what they need, their advantages and their loss."""
