"""Interfaces between the parts of a job: what each part needs from the others and what it offers them."""
