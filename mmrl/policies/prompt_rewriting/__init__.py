"""A language model that rewrites prompts and an image generator that renders them, trained together."""
