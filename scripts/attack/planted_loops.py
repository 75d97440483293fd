"""Faults of what a step in a simulator, a replay and its statistics are quick by."""

from __future__ import annotations

A, S, P = "sims/maniskill/alone.py", "sims/maniskill/simulator.py", "mmrl/policies/vla/policy.py"
LONE, LOOKS, WATCHED = ("sims/test_maniskill_alone.py",), ("policies/vla/test_critics.py",), ("sims/test_checks.py",)
MEANS, STEPS = ("training/test_metrics.py",), ("joints/test_optimizer.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("lone scene: a turn before its place", A, "np.concatenate((pose.p, pose.q))", "np.concatenate((pose.q, pose.p))",
     LONE),
    ("lone scene: a link is where its weight is", A, "self._objs[0].entity_pose", "self._objs[0].cmass_local_pose",
     LONE),
    ("lone scene: all joints get the first target", A, "numbers[i : i + 1]", "numbers[:1]", LONE),
    ("lone scene: classes of tasks are taken over", A, "if kind is batched and", "if isinstance(entity, batched) and",
     LONE),
    ("lone scene: nothing is taken apart", S, "            use_lone_classes(env)", "            pass", LONE),
    ("simulator: steps with a gradient", S, "    @torch.inference_mode()\n    def step(", "    def step(", LONE),
    ("simulator: all garbage is looked for", S, "    gc.freeze()", "    pass", LONE),
    ("simulator: garbage stays for ever", S, "        gc.unfreeze()", "        pass", LONE),
    ("stacked looks: whatever looks there are", P, "elif isinstance(rollouts.inputs, Episodes):",
     "elif isinstance(rollouts.inputs, list):", LOOKS),
    ("stacked looks: again each time", P, "elif isinstance(rollouts.inputs, Episodes):", "elif False:", LOOKS),
    ("stacked looks: none are ever missing", P, "dense = len(episodes.flat) == len(rollouts) * shape[1]",
     "dense = len(episodes.flat) >= shape[0]", LOOKS),
    ("stacked looks: values without a gap in another order", P, "return values.unflatten(0, shape)",
     "return values.flip(0).unflatten(0, shape)", LOOKS),
    ("played looks: executed actions of another row", P, "torch.from_numpy(last.valid[rows])",
     "torch.from_numpy(last.valid[rows[::-1]])", LOOKS),
    ("statistics: NaN is 0", "mmrl/training/metrics.py", "if sums else ~values.isnan()", "if sums or True else values", MEANS),
    ("statistics: one maximum for all names", "mmrl/training/metrics.py", "finite.amax(1) if",
     "finite.amax().expand(len(finite)) if", MEANS),
    ("statistics: a total is a mean", "mmrl/training/metrics.py", "            self._totals.update(columns)", "            pass",
     MEANS),
    ("lone rank: no gradient, no momentum", "mmrl/engine/deepspeed.py", "                if parameter.grad is None:",
     "                if False:", STEPS),
    ("watch: a thread a call", "sims/vector/watch.py", "starts_thread, self._watching = not self._watching, True", "starts_thread = True",
     WATCHED),
    ("watch: it ends and nobody knows", "sims/vector/watch.py",
     "            self._watching = bool(self._calls) and not self._closed.is_set()\n"
     "            return min(end for _, end in self._calls.values()) - now if self._watching else None",
     "            watching = bool(self._calls) and not self._closed.is_set()\n"
     "            return min(end for _, end in self._calls.values()) - now if watching else None", WATCHED),
    ("watch: a call is told of again and again", "sims/vector/watch.py",
     "                    del self._calls[call]\n", "", WATCHED),
]
