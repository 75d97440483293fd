"""Faults of what a user's own program brings. Entries are as in `planted_spans.py`."""

from __future__ import annotations

OWN = ("company/test_own_parts.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("own: states of rewards are not loaded", "mmrl/trainer.py", '            self.task.rewards.load(rank_state["rewards"])\n', "            pass\n", OWN),
    ("own: states of rewards are not saved", "mmrl/trainer.py", '"rewards": self._reward_states(),', '"rewards": {},', OWN),
    ("own: the first rank's state is everybody's", "mmrl/checkpoints/store.py", "states[engine.rank % len(states)]", "states[0]", OWN),
    ("own: any state may be saved", "mmrl/rewards/compose.py", "    elif not (value is None", "    elif False and not (value is None", OWN),
    ("own: what is named may change in any way", "mmrl/checkpoints/training.py", "    if not _differ_in_numbers_only(before, after):", "    if False:", OWN),
    ("own: booleans are numbers", "mmrl/checkpoints/training.py", "isinstance(before, str | bool) or", "isinstance(before, str) or", OWN),
    ("own: shapes may change", "mmrl/checkpoints/training.py", "_under(key, SHAPES) or not", "not", OWN),
    ("own: what is not named may change", "mmrl/checkpoints/store.py", "if fixed is None and key in permitted:", "if fixed is None:", OWN),
    ("own: another component is replaced", "mmrl/rewards/compose.py", "(*self.components[:column], replacement, *self.components[column + 1 :])", "(replacement, *self.components[1:])", OWN),
    ("own: a stop is the end of the run", "mmrl/trainer.py", "if self.stop_signal or self.stop_requested or save_due:", "if self.stop_signal or save_due:", OWN),
    ("own: a stop is not told", "mmrl/job.py", "    elif training.stop_requested and", "    elif False and", OWN),
    ("own: any function has a name", "mmrl/rewards/settings.py", "vars(sys.modules[target.__module__]).get(name) is not target", "False", OWN),
    ("own: a source does not know its run", "mmrl/collection/extra_sources.py", '"""Receives what the source needs, before the first step of a run."""\n        self._context = context', '"""Receives what the source needs, before the first step of a run."""', ("joints/test_branches.py",)),
    ("own: a source counts on rollouts that it does not make", "mmrl/collection/extra_sources.py", "0 where it depends on the groups.\"\"\"\n        return 0", "0 where it depends on the groups.\"\"\"\n        return 1", ("joints/test_replays.py",)),
]
