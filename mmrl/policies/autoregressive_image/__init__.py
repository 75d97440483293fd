"""Language models that write pictures as codes, one after the other."""
