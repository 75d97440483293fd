"""Networks that read observations."""
