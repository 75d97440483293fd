"""How the rollouts of a step come to be."""
