"""Checks of what a job's data, template, rewards, model and simulator do together, before anything slow is paid for.

A probe is a function that takes what it looks at and yields alarms, each one line that names the key, file or row and
what to do. `mmrl check` runs all of them, training the quick ones.
"""

from mmrl.preflight.alarms import Alarm, Findings, one_line

__all__ = ["Alarm", "Findings", "one_line"]
