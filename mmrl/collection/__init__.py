"""Collection of a step's rollouts: draws of prompts, sampling, extra sources, and batches made ahead of training."""
