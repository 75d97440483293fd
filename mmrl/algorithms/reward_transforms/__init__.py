"""Changes of the reward before baseline and scale."""
