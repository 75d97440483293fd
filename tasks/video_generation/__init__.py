"""The task of video generation: synthetic videos of moving shapes, or a user's prompts."""
