"""Parts of a vision-language policy that encode prompts, sample responses and compute their log-probabilities."""
