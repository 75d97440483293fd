"""Where questions come from."""
