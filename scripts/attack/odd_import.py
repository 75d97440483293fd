"""A module that raises when it is imported."""

raise RuntimeError("this module can not be imported")
