"""`mmrl doctor`: what is installed, and with --gpu whether everything works here; and how each problem is mended."""
