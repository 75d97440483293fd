"""Configurations of other systems, converted to those of mmrl by `mmrl convert`."""
