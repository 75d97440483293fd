"""Vision-language-action policies: what an image, an instruction and a robot's state lead to, and how likely."""
