"""What judges the images of the shipped prompts."""
