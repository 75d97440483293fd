"""Vision-language-action policies: what a picture, an instruction and a robot's state lead to, and how likely."""
