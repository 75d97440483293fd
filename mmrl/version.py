"""The version, where the packaging and the program both find it."""

VERSION = "0.2.0"
