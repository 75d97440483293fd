"""Terms that are added to the loss."""
