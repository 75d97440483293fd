"""Processes that generate rollouts in place of the training process, which run `worker.py`."""
