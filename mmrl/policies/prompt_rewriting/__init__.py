"""A language model and an image generator that are trained together: one rewrites prompts, the other draws them."""
