"""Faults of stored policy steps and of learning from recorded episodes. A name, a file, a text that it holds once, what
takes its place, and the tests that could notice."""

from __future__ import annotations

R, S = "mmrl/collection/stored_steps/ring.py", "mmrl/collection/stored_steps/source.py"
T, W = "mmrl/protocols/trajectory.py", "mmrl/terms/losses/advantage_weighted.py"
A, C = "mmrl/algorithms/recorded/recorded.py", "mmrl/algorithms/recorded/conditioned.py"
P, B = "mmrl/policies/vla/policy.py", "mmrl/policies/vla/recording.py"
STORED, WEIGHTED = ("collection/test_stored_steps.py",), ("joints/test_advantage_weighted.py",)
RUNS = ("whole_runs/test_recorded_episodes.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("ring: an image of the episode before", R, "row, executed = step + episode,", "row, executed = step,", STORED),
    ("ring: the whole chunk", R, "actions[step : step + 1][0, :executed]", "actions[step : step + 1][0]", STORED),
    ("ring: rewards of the whole file", R, "rest = slice(step, self.starts[episode + 1])", "rest = slice(step, len(self))", STORED),
    ("ring: rewards from the episode's start", R, "rest = slice(step, self.starts[episode + 1])",
     "rest = slice(self.starts[episode], self.starts[episode + 1])", STORED),
    ("ring: a step later", R, "executed.cumsum() - executed", "executed.cumsum()", STORED),
    ("ring: failures for successes", R, 'good == (chosen == "success")', 'good != (chosen == "success")', STORED),
    ("ring: all whatever is chosen", R, 'chosen == "all" or good', 'True or good', STORED),
    ("ring: never shrinks", R, "self.segments.pop(0)", "break", STORED),
    ("ring: a file too few", R, "sum(map(len, self.segments[:-1])) >= self.size", "sum(map(len, self.segments)) >= self.size", STORED),
    ("ring: files of checkpoints are removed", R,
     "needed |= {self._path(number).name for numbers in self._saved() for number in numbers}", "pass", STORED),
    ("ring: no file is removed", R, "path.unlink(missing_ok=True)", "pass", STORED),
    ("ring: newest first", R, "self.segments = [Segment(self._path(number), self.chosen) for number in state[\"files\"]]",
     "self.segments = [Segment(self._path(number), self.chosen) for number in reversed(state[\"files\"])]", STORED),
    ("ring: numbers begin anew", R, 'self.next = state["next"]', "self.next = 0", STORED),
    ("ring: another order of rows", R, "return [drawn[i] for i in range(len(positions))]", "return list(drawn.values())", STORED),
    ("source: draws begin anew", S, 'self._drawn = state["drawn"]', "pass", STORED),
    ("source: replayed ones are stored again", S, "fresh = rollouts.select(rollouts.origin == FRESH)",
     "fresh = rollouts.select(rollouts.origin >= FRESH)", STORED),
    ("source: unscored ones too", S, "if episode is not None and outcome == outcome", "if episode is not None", STORED),
    ("source: the same draw in each step", S, 'random.Random(f"{self._context.seed} {rank} {step}")',
     'random.Random(f"{self._context.seed} {rank}")', STORED),
    ("source: the same draw on each rank", S, 'random.Random(f"{self._context.seed} {rank} {step}")',
     'random.Random(f"{self._context.seed} {step}")', STORED),
    ("source: demonstrations for replayed ones", S, "replayed.origin = torch.full((count,), REPLAYED)",
     "replayed.origin = torch.full((count,), REPLAYED - 1)", STORED),
    ("policy: what it wanted, not what was executed", P, "actions[rows].astype(np.float32))", 'chosen["actions"].numpy())', STORED),
    ("policy: the observation after the step", P, "        shown.select([i]),\n", "        step.final_observation.select([row]),\n", STORED),
    ("policy: the first action's reward", P, "float(step.reward[row].sum()),", "float(step.reward[row][0]),", STORED),
    ("policy: lost episodes are stored", P, "            if sample.episode is None or sample.episode.lost\n            else trajectory_of", "            if sample.episode is None\n            else trajectory_of", STORED),
    ("record: endless actions are stored", B, "or not np.isfinite(actions).all()", "", STORED),
    ("returns: no discount", T, "gamma ** self.before.astype(np.float64)", "1.0 ** self.before.astype(np.float64)", WEIGHTED),
    ("returns: the outcome is not discounted", T, "discounts[-1] * self.outcome", "self.outcome", WEIGHTED),
    ("returns: the simulator's reward in full", T, "simulator_reward * (discounts * self.rewards).sum()", "(discounts * self.rewards).sum()", WEIGHTED),
    ("returns: later steps count from the start", T, "self.before[steps:] - self.before[steps]", "self.before[steps:]", RUNS),
    ("weights: of worse ones", W, "(advantages / self.temperature).exp()", "(-advantages / self.temperature).exp()", WEIGHTED),
    ("weights: unbounded", W, ".exp().clamp(max=self.most)", ".exp()", WEIGHTED),
    ("weights: negative ones too", W, 'advantages.relu() if self.form == "positive"', 'advantages if self.form == "positive"', WEIGHTED),
    ("term: of any origin", W, "((origin == wanted) & ~returns.isnan())", "(~returns.isnan())", WEIGHTED),
    ("term: the critic learns from it", W, "value[:, 0].detach()", "value[:, 0]", WEIGHTED),
    ("recorded: weights have a gradient", "mmrl/algorithms/recorded/weighted.py", "self.difference(micro, replay).detach()",
     "self.difference(micro, replay)", WEIGHTED),
    ("recorded: the other expectile", "mmrl/core/values.py", "torch.where(difference < 0, 1 - expectile, expectile)",
     "torch.where(difference < 0, expectile, 1 - expectile)", WEIGHTED),
    ("recorded: the critic's weight", A, "self.value_coefficient * error.sum()", "error.sum()", WEIGHTED),
    ("recorded: a mean over decisions", A, 'over.totals["valued"].clamp(min=1)', 'over.totals["decisions"].clamp(min=1)', WEIGHTED),
    ("conditioned: bad for good", C, "good if difference > bound else bad", "bad if difference > bound else good", RUNS),
    ("conditioned: the least share", C, "differences.quantile(1 - self.positive)", "differences.quantile(self.positive)", RUNS),
    ("conditioned: labels are never left out", C, '"" if drops else', "", RUNS),
    ("conditioned: the same steps have none for ever", C, 'random.Random(f"{prompt.id} {difference!r}")', 'random.Random(prompt.id)', RUNS),
    ("conditioned: the critic reads labels", C, "return micro.mask.any(1) & (self._label_column(micro) == 0)", "return micro.mask.any(1)", RUNS),
    ("conditioned: plays under no label", P, "labels = [self.advantage_labels[0]] * len(observation)", 'labels = [""] * len(observation)', RUNS),
    ("conditioned: demonstrates under the good label", P, 'labels = [prompt.metadata.get("label", "") for prompt in prompts]',
     "labels = None", RUNS),
    ("expert: wanted actions are shown", "tasks/manipulation/episodes.py", "shown = actions.astype(np.float32) if executed else wanted",
     "shown = wanted", RUNS),
    ("expert: every episode succeeded", "tasks/manipulation/episodes.py", "float(solved[row]))", "1.0)", RUNS),
    ("lerobot: success at the end alone", "tasks/manipulation/lerobot.py", "float(success.any())", "float(success[0, 0])", ("tasks/test_lerobot.py",)),
]
# fmt: on
