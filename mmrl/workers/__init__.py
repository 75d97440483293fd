"""Rollout workers: processes that sample rollouts in place of the training process."""
