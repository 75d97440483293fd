"""Faults of workers that make rollouts apart from training. Each entry has a name, a file, a string that occurs once in
the file, its replacement, and the tests that should then fail."""

from __future__ import annotations

P, W, D, H = "mmrl/workers/pool.py", "mmrl/workers/worker.py", "mmrl/children/listener.py", "mmrl/workers/handles.py"
POOL, WIRE, DOOR = ("workers/test_pool.py",), ("children/test_frames.py",), ("children/test_listener.py",)
C, CHANNEL, SIMULATORS = "mmrl/children/channel.py", ("children/test_channel.py",), ("sims/test_workers.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("workers: all draw with the first one's seeds", P, "seeds[first * group_size : last * group_size]",
     "seeds[: (last - first) * group_size]", POOL),
    ("workers: the step of a batch is not told", P, 'options = {"step": step,', 'options = {"step": 0,', POOL),
    ("workers: controls stay what they were", W, "        self.controls.load(controls)\n", "", POOL),
    ("workers: weights arrive once", P, "if handle.weights == self.current.number:", "if handle.weights:", POOL),
    ("workers: frozen weights are not compared", P, "frozen = self.frozen if started else {}",
     "frozen: dict[str, Checksum] = {}", POOL),
    ("workers: nothing that differs is named", P, "wrong = [*differing(expected, actual), *absent(expected, actual)]",
     "wrong = [*absent(expected, actual)]", POOL),
    ("workers: no likelihoods come along", P, '"likelihoods": self.settings.async_steps > 0', '"likelihoods": False',
     POOL),
    ("workers: what they counted is lost", P, "self._counted.get(name, 0.0) + count", "self._counted.get(name, 0.0)",
     POOL),
    ("workers: groups of the first worker alone", P, "return replace(Rollouts.concat(parts), group=group)",
     "return Rollouts.concat(parts)", POOL),
    ("workers: one that is started again counts as up to date", H, "        self.child.stop()\n"
     "        self.weights = 0", "        self.child.stop()", POOL),
    ("workers: predictions of older weights pass for those of now", "mmrl/policies/diffusion/settings.py",
     "useful and not is_async and kept_by_chain", "useful and kept_by_chain", POOL),
    ("workers: more of them than prompts", "mmrl/collection/checks.py", "at_once = config.generator, prompts_at_once(config, world)",
     "at_once = config.generator, prompts_at_once(config, 1)", POOL),
    ("workers: any class is made of a message", "mmrl/children/frames.py", "isinstance(kind, type) and is_dataclass(kind)",
     "isinstance(kind, type)", WIRE),
    ("workers: every run has the same key", D, "self.key = secrets.token_hex(32)", 'self.key = "another key"', DOOR),
    ("children: a deadline is none", C, "        if now >= self._end:", "        if False:", CHANNEL),
    ("children: a stopped process is awaited", C, "        if now >= self._silent:", "        if False:", CHANNEL),
    ("children: signs of life are not heard", C, "            patience.heard()\n", "", CHANNEL),
    ("children: any length is read", C, "        if size > max_bytes:", "        if False:", CHANNEL),
    ("children: whoever calls is taken in", D, "_challenge(caller, key, answer_challenge, deliver_challenge)",
     "_challenge(caller, key, answer_challenge)", DOOR),
    ("children: no record that is allowed means all", "mmrl/children/frames.py", "self.records is None or",
     "not self.records or", WIRE),
    ("children: none gives a sign of life", "mmrl/children/main.py", "                channel.send()\n",
     "                pass\n", SIMULATORS),
    ("children: orphans stay", "mmrl/children/main.py",
     "    threading.Thread(target=end_with_parent, daemon=True).start()\n", "", ("workers/test_processes.py",)),
    ("children: a late worker is hired again", "mmrl/children/fork_server.py", "if (reason := self.fork_server.terminate(self)) is None",
     "if (why := None) is None", ("rewards/test_isolated.py",)),
    ("workers: an evaluation hides a restart", "mmrl/trainer.py", "in measured.items() if not name",
     "in {}.items() if not name", POOL),
    ("report: what evaluations lost is not counted", "mmrl/report/health.py",
     'values = [*run.series(name).finite, *run.series(f"evaluation/{name}").finite]',
     "values = run.series(name).finite", ("report/test_report.py",)),
    ("workers: the log of a host that was lost", "mmrl/workers/handles.py", "if not self.log.exists():", "if False:",
     ("children/test_ray.py::test_rollout_workers_on_another_host_make_what_training_would",)),
]
