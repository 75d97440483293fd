"""Faults of discrete diffusion beside those of `planted.py`: a name, a file, a text that it holds once, what takes its
place, and the tests that could notice."""

from __future__ import annotations

A, M = "mmrl/algorithms/", "mmrl/policies/masked/"
DMPO = ("joints/test_distribution_matching.py",)
TILT = ("joints/test_tilt_matching.py",)
TRACES = ("policies/masked/test_traces.py",)
STABLE = ("joints/test_self_normalised.py",)
SPEED = ("policies/masked/test_threshold.py",)
UNIFORM = ("policies/masked/test_uniform.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("distribution_matching: the importance weight is turned", A + "distribution_matching.py",
     "(rollouts.ref_logp - rollouts.old_logp)", "(rollouts.old_logp - rollouts.ref_logp)", DMPO),
    ("distribution_matching: rewards are not divided", A + "distribution_matching.py",
     "batch.combined() / self.alpha.value", "batch.combined()", DMPO),
    ("distribution_matching: the present policy weighs all alike", A + "distribution_matching.py",
     "moved[rows].softmax(0)", "1 / len(rows)", DMPO),
    ("distribution_matching: likelihoods fall", A + "distribution_matching.py",
     "(-weight * replay.logp)", "(weight * replay.logp)", DMPO),
    ("distribution_matching: what was not scored takes part", A + "distribution_matching.py",
     "part = ~rewards.isnan() & (batch", "part = (batch", DMPO),
    ("distribution_matching: filler teaches", A + "distribution_matching.py",
     "mine = mine & ~rollouts.filler", "pass", DMPO),
    ("uniform: every step replaces as many", M + "uniform.py", "1 / (self.noising.steps - turn)",
     "1 / self.noising.steps", UNIFORM),
    ("uniform: noise is one token", M + "uniform.py", "(uniform * len(self.allowed)).long()",
     "(uniform * 0).long()", UNIFORM),
    ("uniform: levels are not stratified", M + "uniform.py",
     "(torch.arange(draws) + torch.rand(draws, generator=generator))",
     "(draws * torch.rand(draws, generator=generator))", UNIFORM),
    ("uniform: replaced tokens alone count", M + "uniform.py", "States(empty, torch.full((draws, length), 1 / draws)",
     "States(empty, empty / draws", UNIFORM),
    ("uniform: what is kept is replaced", M + "uniform.py", "torch.where(states.empty[state], self",
     "torch.where(~states.empty[state], self", UNIFORM),
    ("uniform: noise starts from one row for all", M + "uniform.py",
     "for generator in generators]\n        return torch",
     "for generator in generators[:1] * len(generators)]\n        return torch", UNIFORM),
    ("tilt_matching: rewards are not tilted by", A + "tilt_matching.py", "(self.tilt.value * batch.combined()).exp()",
     "(1.0 * batch.combined()).exp()", TILT),
    ("tilt_matching: the old policy is left", A + "tilt_matching.py",
     "+ factor.values.to(where)[:, None] * replay", "- factor.values.to(where)[:, None] * replay", TILT),
    ("tilt_matching: a rollout is one of its others", A + "tilt_matching.py",
     "(worth[rows].sum() - worth[rows]) / (len(rows) - 1)", "worth[rows].mean()", TILT),
    ("tilt_matching: filler is pulled back", A + "tilt_matching.py", "mine.masked_fill(batch.rollouts.filler, 0.0)",
     "mine", TILT),
    ("tilt_matching: another state's distribution", M + "policy.py", "rollouts.old_prediction[rollout, place, state]",
     "rollouts.old_prediction[rollout, place, 0]", TILT),
    ("tilt_matching: cross-entropy to itself", M + "policy.py", "-(old.exp() * logp.where(possible, 0.0))",
     "-(logp.exp() * logp.where(possible, 0.0))", TILT),
    ("step_merge: segments begin a step late", M + "likelihoods.py", "((steps + 1) * segments - 1) // last",
     "(steps * segments + 1) // last", TRACES),
    ("any_order: places of one step see each other", M + "policy.py", "earlier = states.order[None, :] < states",
     "earlier = states.order[None, :] <= states", TRACES),
    ("any_order: what was filled sees what came later", M + "policy.py", "prompt : prompt + n] = ~earlier.T",
     "prompt : prompt + n] = True", TRACES),
    ("any_order: mask tokens stand behind", M + "policy.py", "torch.cat([torch.arange(prompt), places, places])",
     "torch.arange(prompt + 2 * n)", TRACES),
    ("elbo: antithetic states repeat the first", M + "likelihoods.py", "[empty, rank >= count[:, None] - 1]",
     "[empty, empty]", TRACES),
    ("self_normalised: one side is not clipped", A + "self_normalised.py",
     "ratio.clamp(1 - self.low.value, 1 + self.high.value)", "ratio.clamp(max=1 + self.high.value)", STABLE),
    ("self_normalised: weights are not shared out", A + "self_normalised.py", "weight[rows] / counted.mean()",
     "weight[rows]", STABLE),
    ("self_normalised: garbage counts", A + "self_normalised.py", "weight[rows][mask[rows]]", "weight[rows].flatten()",
     STABLE),
    ("self_normalised: sign", A + "self_normalised.py", "return -share", "return share", STABLE),
    ("threshold: places that are filled are written again", M + "policy.py", "now &= open_", "now = now", SPEED),
    ("threshold: unlikely tokens come at once", M + "policy.py", "chosen.exp() >= self.unmasking.threshold",
     "chosen.exp() < self.unmasking.threshold", SPEED),
    ("tokens_per_forward: upside down", "mmrl/rewards/verifiers.py", "sample.response_length / sample.forwards",
     "sample.forwards / sample.response_length", SPEED),
]
