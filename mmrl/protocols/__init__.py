"""What the parts of a job ask of one another and offer one another."""
