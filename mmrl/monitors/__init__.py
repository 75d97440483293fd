"""Guards: bands that metrics shall stay in, and what happens when they do not."""
