"""Processes that make rollouts in place of the training process; `worker.py` is what runs in them."""
