"""`mmrl doctor`: checks installed packages, with --gpu also that everything works here, and names mends."""
