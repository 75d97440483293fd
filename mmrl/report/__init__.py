"""The output of a run for people: metrics, tables of samples, a report."""
