"""Numbers that change while a run continues, and controllers that follow a metric."""
