"""The one exception a user is meant to read: its text is a single line that says what to change."""


class UserError(Exception):
    """Input that cannot be used. The command line prints the message and exits with 2, without a traceback."""
