"""Collection of a step's rollouts: the order of prompts, sampling, extra sources of rollouts, and batches that are
sampled ahead of training."""
