"""Diffusers pipelines as families, by class. Add one by a class here and its line in
`pipelines.CLASSES`, or from outside by `model.family`."""
