"""Robot manipulation in a simulator."""
