"""Readers of text: what a response states, in whichever typography. Gold answers pass the same readers.

The time of each grows with the length of a string, never with its square: regular expressions that could match in many
ways are possessive.
"""
