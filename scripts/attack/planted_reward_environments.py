"""Faults of rewards under other interpreters, of their installation, and of judges that write. Entries are as in
`planted_spans.py`."""

from __future__ import annotations

M, J = "mmrl/rewards/models/", "mmrl/rewards/judges/"
INTERPRETER = "mmrl/rewards/services/interpreter.py"
RUN, MADE = ("rewards/test_interpreter.py",), ("rewards/models/test_environments.py",)
WRITTEN = ("rewards/test_written_judges.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("interpreter: a crash ends it for good", INTERPRETER, "            if not self._child.up:\n                self._start()\n", "", RUN),
    ("interpreter: every reward scores single samples", INTERPRETER, "self.facts = self.reward.scope if", "self.facts = 'sample' if", RUN),
    ("interpreter: a late batch has no deadline of its own", INTERPRETER, "self._child.ask(request, self.deadline_s)", "self._child.ask(request, START_S)", RUN),
    ("interpreter: late samples count as crashes", INTERPRETER, "failure = self.failures.record_timeout(self.deadline_s)", 'failure = Failure("crash", "late")', RUN),
    ("interpreter: options are lost", INTERPRETER, '"options": dict(options),', '"options": {},', RUN),
    ("interpreter: code of weights runs in the trainer", "mmrl/rewards/compose.py", "if spec.name in NEEDS_OWN_PYTHON:", "if False:", RUN),
    ("deqa: the first batch alone", M + "deqa.py", "images[first : first + BATCH_SIZE]", "images[:BATCH_SIZE]", RUN),
    ("environments: the marker comes first", M + "environments.py", "        _create(environment)\n        _install_packages(environment, entry.requirements)\n", "        _create(environment)\n        (environment / MARKER).write_text(_marker_text(entry))\n        _install_packages(environment, entry.requirements)\n", MADE),
    ("environments: an old list of packages counts", M + "environments.py", "marker.read_text() == _marker_text(entry)", "marker.read_text()", MADE),
    ("environments: a folder of a user's is cleared", M + "environments.py", 'not (environment / "pyvenv.cfg").exists() and any', 'not environment.exists() and any', MADE),
    ("environments: leftovers stay", M + "environments.py", "venv.EnvBuilder(clear=True,", "venv.EnvBuilder(clear=False,", MADE),
    ("environments: pip's first error line", M + "environments.py", "reversed(lines) if line.startswith(\"ERROR\")", "lines if line.startswith(\"ERROR\")", MADE),
    ("environments: two at once", M + "environments.py", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB if False else fcntl.LOCK_UN", MADE),
    ("environments: a dry run installs", "mmrl/cli/main.py", "(plan if options.dry_run else install)", "(install if options.dry_run else plan)", MADE),
    ("written: the first marker counts", J + "written.py", "text.rpartition(self.after)", "text.partition(self.after)", WRITTEN),
    ("written: not scaled", J + "written.py", "(number - self.low) / (self.high - self.low)", "number / self.high", WRITTEN),
    ("written: beyond the bounds", J + "written.py", "if self.low <= number <= self.high else None", "if True else None", WRITTEN),
    ("written: a word may go on", J + "written.py", r"(?!\w|\.\d)", "", WRITTEN),
    ("written: the source is not shown", J + "written.py", "if self.source else ()", "if not self.source else ()", WRITTEN),
    ("soft_tifa: digits do not count", J + "soft_tifa.py", "min(1.0, word + digit)", "min(1.0, word)", WRITTEN),
    ("soft_tifa: a word counts twice", J + "soft_tifa.py", "if words[0] != words[1] else word", "if True else word", WRITTEN),
    ("soft_tifa: the geometric mean is a product", J + "soft_tifa.py", "sum(map(math.log, values)) / len(values)) if", "sum(map(math.log, values))) if", WRITTEN),
]
