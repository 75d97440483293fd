"""`mmrl doctor`: checks installed packages, with --gpu also that all works here, and prints how to fix problems."""
