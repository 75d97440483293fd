"""A diffusion model whose rollouts are drawn by a few-step copy of it, which is distilled during training."""
