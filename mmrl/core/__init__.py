"""Pure tensor functions of reinforcement learning: advantages, ratios, surrogates, reductions. No model, no I/O."""
