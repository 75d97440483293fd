"""Policies: models that sample rollouts and compute their log-probabilities. Each type of model has a folder."""
