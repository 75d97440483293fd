"""The command line, its reference, skeletons and converters."""
