"""Additions to any algorithm: loss terms, advantage shapers and masks of decisions, one small file each."""
