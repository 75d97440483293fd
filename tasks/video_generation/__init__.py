"""Video generation: drawn videos of moving shapes or a user's prompts, rewards that track what moves, and guards."""
