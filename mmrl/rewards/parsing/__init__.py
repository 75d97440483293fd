"""Parsers of responses: the answer, and the numbers, letters, boxes and times in it, in any typography. Gold answers go
through the same parsers.

The time of each grows linearly with the length of a string, never with its square. Therefore regular expressions that
could match in many ways are possessive.
"""
