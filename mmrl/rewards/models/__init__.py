"""Published reward models of images and videos, built from classes of transformers and weights that the user has.

Each reads the parameter names of its publisher's file, so that a tiny file in that layout tests it fully. The published
weights themselves were not available for tests ("format tested"). To add one, write a class beside these and add a line
to the registry. `catalogue` lists what rewards need, and `environments` installs it.
"""
