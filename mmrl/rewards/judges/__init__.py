"""Models as judges of images and texts."""
