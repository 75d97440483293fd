"""What a run leaves behind for people: metrics, tables of samples, a report."""
