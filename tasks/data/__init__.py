"""Data that several tasks share."""
