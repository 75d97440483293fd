"""Published reward models of images and videos, built from classes of transformers and the weights that you have.

Each reads the names that its publisher's file has, so a tiny file in that layout tests the whole path; their own
weights were not to be had here ("format tested"). A new one is a class beside these, and a line in the registry.
"""
