"""What a decision of a diffusion policy is: a step of a chain, a noise level, or the last steps with their gradient."""
