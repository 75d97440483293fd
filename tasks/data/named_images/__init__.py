"""Small images of some two hundred things, by name, in the styles of three icon sets."""
