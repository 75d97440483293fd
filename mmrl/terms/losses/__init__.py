"""Loss terms."""
