"""The interface of simulators, and the workers that run them."""
