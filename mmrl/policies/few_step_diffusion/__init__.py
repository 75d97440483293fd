"""A diffusion model whose rollouts are sampled by a few-step student, which is distilled from it during training."""
