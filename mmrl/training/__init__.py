"""From scored rollouts to minibatches: preparation, balancing, metrics."""
