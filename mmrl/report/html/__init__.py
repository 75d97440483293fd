"""The report page: what it shows of runs, how it is written, and how it is served."""
