"""Which prompt comes next, and its views."""
