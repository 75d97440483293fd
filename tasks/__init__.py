"""Tasks: prompts, what a rollout earns, and what counts as success."""
