"""What the difference from the baseline is divided by, and how rewards are combined."""
