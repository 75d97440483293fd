"""Faults of replayed rollouts, and of masks and transforms by advantages. Each entry has a name, a file, a string that
occurs once in the file, its replacement, and the tests that should then fail."""

from __future__ import annotations

R, G = "mmrl/collection/replay_buffer.py", "mmrl/terms/losses/replay_policy_gradient.py"
D, S, N = "mmrl/terms/masks/decisions.py", "mmrl/collection/extra_sources.py", "mmrl/rollouts.py"
LARGE = ("joints/test_large_advantages.py",)

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
    ("advantages: the mean over all positions", N, "rollouts.mask.sum(1).clamp(min=1)", "rollouts.mask.shape[1]", LARGE),
]
