"""Checks that a job's data, chat template, rewards, model and simulator work together, before training starts.

A probe is a function that yields alarms about what it is given. Each alarm is one line that names the key, file or row
and what to do. `mmrl check` runs all probes, `mmrl train` only the quick ones.
"""

from mmrl.preflight.alarms import Alarm, CheckReport, one_line

__all__ = ["Alarm", "CheckReport", "one_line"]
