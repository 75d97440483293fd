"""Responses that branch: further members of a group that begin as an earlier one does."""
