"""Responses that branch: new members of a group that share the beginning of an earlier member."""
