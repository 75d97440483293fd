"""Backbones: networks that read observations."""
