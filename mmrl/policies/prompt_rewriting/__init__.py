"""A language model and a generator that are trained together: the one writes prompts anew, the other draws them."""
