"""Child processes: messages and connections to them, deadlines, limits, and how they are started and ended."""
