"""Faults of discrete diffusion beside those of `planted.py`. Each entry has a name, a file, a string that occurs once
in the file, its replacement, and the tests that should then fail."""

from __future__ import annotations

A, M = "mmrl/algorithms/", "mmrl/policies/discrete_diffusion/"
DMPO = ("joints/test_distribution_matching.py",)
TILT = ("joints/test_tilt_matching.py",)
TRACES = ("policies/discrete_diffusion/test_traces.py",)
STABLE = ("joints/test_self_normalised.py",)
SPEED = ("policies/discrete_diffusion/test_threshold.py",)
UNIFORM = ("policies/discrete_diffusion/test_uniform.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("distribution_matching: the importance weight is turned", "mmrl/algorithms/denoising/distribution_matching.py",
     "(rollouts.ref_logp - rollouts.old_logp)", "(rollouts.old_logp - rollouts.ref_logp)", DMPO),
    ("distribution_matching: rewards are not divided", "mmrl/algorithms/denoising/distribution_matching.py",
     "batch.combined_rewards() / self.alpha.value", "batch.combined_rewards()", DMPO),
    ("distribution_matching: the present policy weighs all alike", "mmrl/algorithms/denoising/distribution_matching.py",
     "log_ratio[rows].softmax(0)", "1 / len(rows)", DMPO),
    ("distribution_matching: likelihoods fall", "mmrl/algorithms/denoising/distribution_matching.py",
     "(-weight * replay.logp)", "(weight * replay.logp)", DMPO),
    ("distribution_matching: what was not scored takes part", "mmrl/algorithms/denoising/distribution_matching.py",
     "in_loss = ~rewards.isnan() & (batch", "in_loss = (batch", DMPO),
    ("distribution_matching: filler teaches", "mmrl/algorithms/denoising/distribution_matching.py",
     "local_in_loss = local_in_loss & ~rollouts.filler", "pass", DMPO),
    ("uniform: every step replaces as many", "mmrl/policies/discrete_diffusion/uniform.py", "1 / (self.noising.steps - step)",
     "1 / self.noising.steps", UNIFORM),
    ("uniform: noise is one token", "mmrl/policies/discrete_diffusion/uniform.py", "(uniform * len(self.allowed)).long()",
     "(uniform * 0).long()", UNIFORM),
    ("uniform: levels are not stratified", "mmrl/policies/discrete_diffusion/uniform.py",
     "part = torch.arange(num_states) + torch.rand(",
     "part = num_states * torch.rand(", UNIFORM),
    ("uniform: replaced tokens alone count", "mmrl/policies/discrete_diffusion/uniform.py", "States(masked, torch.full((num_states, length), 1 / num_states)",
     "States(masked, masked / num_states", UNIFORM),
    ("uniform: what is kept is replaced", "mmrl/policies/discrete_diffusion/uniform.py", "torch.where(states.masked[state], self",
     "torch.where(~states.masked[state], self", UNIFORM),
    ("uniform: noise starts from one row for all", "mmrl/policies/discrete_diffusion/uniform.py",
     "for generator in generators]\n        return torch",
     "for generator in generators[:1] * len(generators)]\n        return torch", UNIFORM),
    ("tilt_matching: rewards are not tilted by", "mmrl/algorithms/denoising/tilt_matching.py", "(self.tilt.value * batch.combined_rewards()).exp()",
     "(1.0 * batch.combined_rewards()).exp()", TILT),
    ("tilt_matching: the old policy is left", "mmrl/algorithms/denoising/tilt_matching.py",
     "+ factor.values.to(device)[:, None] * cross_entropy", "- factor.values.to(device)[:, None] * cross_entropy", TILT),
    ("tilt_matching: a rollout is one of its others", "mmrl/algorithms/denoising/tilt_matching.py",
     "(tilted[rows].sum() - tilted[rows]) / (len(rows) - 1)", "tilted[rows].mean()", TILT),
    ("tilt_matching: filler is pulled back", "mmrl/algorithms/denoising/tilt_matching.py", "local_factor.masked_fill(batch.rollouts.filler, 0.0)",
     "local_factor", TILT),
    ("tilt_matching: another state's distribution", "mmrl/policies/discrete_diffusion/policy.py", "rollouts.old_prediction[rollout, position, state]",
     "rollouts.old_prediction[rollout, position, 0]", TILT),
    ("tilt_matching: cross-entropy to itself", "mmrl/policies/discrete_diffusion/scorer.py", "-(old.exp() * logp.where(not_suppressed, 0.0))",
     "-(logp.exp() * logp.where(not_suppressed, 0.0))", TILT),
    ("step_merge: segments begin a step late", "mmrl/policies/discrete_diffusion/likelihoods.py", "((steps + 1) * segments - 1) // num_steps",
     "(steps * segments + 1) // num_steps", TRACES),
    ("any_order: places of one step see each other", "mmrl/policies/discrete_diffusion/inputs.py", "earlier = order[None, :] < order",
     "earlier = order[None, :] <= order", TRACES),
    ("any_order: what was filled sees what came later", "mmrl/policies/discrete_diffusion/inputs.py", "prompt : prompt + n] = ~earlier.T",
     "prompt : prompt + n] = True", TRACES),
    ("any_order: mask tokens stand behind", "mmrl/policies/discrete_diffusion/inputs.py", "torch.cat([torch.arange(prompt), response_positions, response_positions])",
     "torch.arange(prompt + 2 * n)", TRACES),
    ("elbo: antithetic states repeat the first", "mmrl/policies/discrete_diffusion/likelihoods.py", "[masked, rank >= num_masked[:, None] - 1]",
     "[masked, masked]", TRACES),
    ("self_normalised: one side is not clipped", "mmrl/algorithms/surrogates/self_normalised.py",
     "ratio.clamp(1 - self.low.value, 1 + self.high.value)", "ratio.clamp(max=1 + self.high.value)", STABLE),
    ("self_normalised: weights are not shared out", "mmrl/algorithms/surrogates/self_normalised.py", "weight[rows] / group_weights.mean()",
     "weight[rows]", STABLE),
    ("self_normalised: garbage counts", "mmrl/algorithms/surrogates/self_normalised.py", "weight[rows][mask[rows]]", "weight[rows].flatten()",
     STABLE),
    ("self_normalised: sign", "mmrl/algorithms/surrogates/self_normalised.py", "return -normalized", "return normalized", STABLE),
    ("threshold: places that are filled are written again", "mmrl/policies/discrete_diffusion/policy.py", "fill &= masked", "fill = fill", SPEED),
    ("threshold: unlikely tokens come at once", "mmrl/policies/discrete_diffusion/policy.py", "token_logp.exp() >= self.unmasking.threshold",
     "token_logp.exp() < self.unmasking.threshold", SPEED),
    ("tokens_per_forward: upside down", "mmrl/rewards/verifiers.py", "sample.response_length / sample.forwards",
     "sample.forwards / sample.response_length", SPEED),
]
