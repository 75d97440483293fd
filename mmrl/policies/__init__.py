"""Models that make rollouts and say how likely they are: a folder a kind of model."""
