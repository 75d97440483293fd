"""A task made from its section, as a run makes it."""

from mmrl.settings import choose
from mmrl.tasks.settings import TaskSettings


def build(kind, options, seed):
    """The task of type `kind`. Raises ValueError naming the key at fault, and as the task does."""
    return choose(TaskSettings, {"type": kind, **options}, ("task",)).build(seed)
