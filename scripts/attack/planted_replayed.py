"""Faults of replayed rollouts, masks by advantages, nodes of trees, and transforms of rewards. Each entry has a name, a file, a string that
occurs once in the file, its replacement, and the tests that should then fail."""

from __future__ import annotations

R, G = "mmrl/collection/replay_buffer.py", "mmrl/terms/losses/replay_policy_gradient.py"
D, S = "mmrl/terms/masks/decisions.py", "mmrl/collection/extra_sources.py"
C, P, T = "mmrl/core/credit.py", "mmrl/collection/branches/points.py", "mmrl/algorithms/reward_transforms/"
L, K, U = "mmrl/terms/shapers/likelihoods.py", "mmrl/algorithms/surrogates/clips.py", "mmrl/prompts/curriculum.py"
E, TURNS = "mmrl/terms/shapers/entropy.py", ("joints/test_turn_credit.py",)
LARGE, TREES = ("joints/test_large_advantages.py",), ("joints/test_branches.py",)
TRANSFORMS, SHAPERS, ORDER = (
    ("joints/test_transforms.py",),
    ("joints/test_shapers.py",),
    ("prompts/test_curriculum.py",),
)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("replay: only positive advantages", R, "(advantages.abs() >= self.least)", "(advantages >= self.least)", LARGE),
    ("replay: demonstrations are kept", R, " & ((origin == FRESH) | (origin == EXTRA))", "", LARGE),
    ("replay: the oldest are kept", R, "*((prompt, entry) for _, prompt, entry in gathered)][-self.keep :]", "*((prompt, entry) for _, prompt, entry in gathered)][: self.keep]", LARGE),
    ("replay: one step late", R, "self._steps % self.every == 0 and", "self._steps % self.every == 1 and", LARGE),
    ("replay: every rank has all", R, "range(rank, len(sampled), world)", "range(len(sampled))", LARGE),
    ("replay: they are scored", R, "parts[0].rewards = torch.full_like(parts[0].rewards, torch.nan)", "parts[0].rewards = parts[0].rewards", LARGE),
    ("replay: padding has an advantage", R, "advantages = torch.full((len(replayed),), torch.nan)", "advantages = torch.zeros(len(replayed))", LARGE),
    ("replay: steps are forgotten", R, 'self._steps, self._stored = state["steps"], ', 'self._steps, self._stored = 0, ', LARGE),
    ("replay: the bounds are swapped", G, "clip_low=self.low,\n            clip_high=self.high", "clip_low=self.high,\n            clip_high=self.low", LARGE),
    ("replay: no coefficient", G, "self.coefficient.value * values", "values", LARGE),
    ("replay: the sign", G, "advantages.nan_to_num(),", "-advantages.nan_to_num(),", LARGE),
    ("small advantages: only positive ones", D, "large = (advantages.abs() >= least)", "large = (advantages >= least)", LARGE),
    ("small advantages: one bound for all", D, "torch.tensor(self.extra).where(origin == EXTRA, self.least)", "torch.tensor(self.least)", LARGE),
    ("small advantages: what is wrong and too long goes too", D, "(truncated & (advantages > 0) & self.truncated)", "(truncated & self.truncated)", LARGE),
    ("small advantages: what is replayed goes too", D, "selected = large | ((origin != FRESH) & (origin != EXTRA))", "selected = large", LARGE),
    ("sources: records of a part are dropped", S, "fresh = with_records(fresh, added)", "pass", LARGE),
    ("advantages: the mean over all positions", "mmrl/protocols/batch.py", "0).sum(1) / rollouts.mask.sum(1)", "0).sum(1) / rollouts.mask.shape[1]", LARGE),
    ("node_gains: every decision is a node", C, "times.where(begins, 0).cummax(0).values", "times", TREES),
    ("node_gains: unknown rewards end a node", C, "(shared[:, 1:] != shared[:, :-1])", "(through[:, 1:] != through[:, :-1])", TREES),
    ("node_gains: the group alone", C, "gain = value - torch.cat([root[None], value])[first] + whole", "gain = value - root + whole", TREES),
    ("node_gains: no whole", C, " + whole * (value - root)", "", TREES),
    ("text_ends: one decision early", P, "cut = 1 + next(", "cut = next(", TREES),
    ("text_ends: nothing comes after", P, "if cut < int(members.mask[row].sum()):", "if True:", TREES),
    ("length: wrong ones are rewarded", T + "length.py", "bonus.clamp(max=0)", "bonus", TRANSFORMS),
    ("length: of unscored ones too", T + "length.py", "group_rows(rewards, batch", "group_rows(rewards.nan_to_num(), batch", TRANSFORMS),
    ("length: the sign", T + "length.py", "0.5 - (length", "0.5 + (length", TRANSFORMS),
    ("perturbation: the variance", T + "perturbation.py", "self.std.value *", "self.std.value ** 2 *", TRANSFORMS),
    ("certainty: the sign", T + "certainty.py", "- self.weight *", "+ self.weight *", TRANSFORMS),
    ("tapered: of both signs", K, "clamp(max=1).where(advantages < 0, 1.0)", "clamp(max=1)", ("joints/test_clips.py",)),
    ("tapered: no bound", K, "ratio.clamp(max=1).where(", "ratio.where(", ("joints/test_clips.py",)),
    ("mastered: wrong ones too", D, "(batch.combined_rewards() > self.threshold) & (batch", "(batch", ("joints/test_masks.py",)),
    ("mastered: whatever the entropy", D, ' & (batch.column("entropy") < self.entropy)', "", ("joints/test_masks.py",)),
    ("mastered: improbable ones", D, "exp() >= self.probability", "exp() <= self.probability", ("joints/test_masks.py",)),
    ("perplexity: unscored ones count", L, "~batch.combined_rewards().isnan()", "~perplexity.isnan()", SHAPERS),
    ("perplexity: the sign", L, "1 - self.alpha *", "1 + self.alpha *", SHAPERS),
    ("position: of the longest rollout", L, "mask.sum(1, keepdim=True).clamp(min=1)", "mask.shape[1]", SHAPERS),
    ("position: always upward", L, "advantages.sign() * self.weight", "self.weight", SHAPERS),
    ("rollback: no limit", U, "failed and returns < self.times and", "failed and", ORDER),
    ("rollback: twice in line", U, " and outcome.prompt not in self._waiting:", ":", ORDER),
    ("rollback: right ones return", U, "max(known) < self.accuracy", "max(known) >= self.accuracy", ORDER),
    ("rollback: no share", U, "math.ceil(self.share * count)", "count", ORDER),
    ("rollback: forgets who waits", U, 'self._waiting = list(state["waiting"])', "self._waiting = []", ORDER),
    ("rollback: forgets how often", U, 'self._returns = {int(prompt): count for prompt, count in state["returns"].items()}', "self._returns = {}", ORDER),
    ("entropy of turns: of decisions", E, "entropy = means.gather(1, number)", "pass", TURNS),
    ("entropy of turns: the same turn's", E, "F.pad(turn_means, (0, 1))[:, 1:]", "turn_means", TURNS),
    ("entropy of turns: the last has one after it", E, "F.pad(turn_mask, (0, 1))[:, 1:]", "turn_mask", TURNS),
    ("entropy of turns: padding counts", E, "values.where(mask, 0)", "values", TURNS),
    ("replay: all alike", R, 'if self.draw == "size" else 1.0', 'if False else 1.0', LARGE),
    ("replay: small ones more often", R, "/ weight for weight", "* weight for weight", LARGE),
]
