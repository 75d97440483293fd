"""Processes that this one starts: what they are sent, where they call in, how long they may take, and how they end."""
