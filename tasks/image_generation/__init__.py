"""Image generation from prompts: handwritten digits, scenes of shapes, or prompt files of the user."""
