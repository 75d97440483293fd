"""Models that judge images and texts."""
