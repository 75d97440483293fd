"""Language models that write images as codes, one after the other."""
