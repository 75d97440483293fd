"""What is subtracted from a reward."""
