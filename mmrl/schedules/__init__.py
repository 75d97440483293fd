"""Numbers that change while a run goes on, and controllers that follow a metric."""
