"""Faults of methods that are compared with their released code. Each entry has a name, a file, a string that occurs
once in the file, its replacement, and the tests that should then fail."""

from __future__ import annotations

T, C, R = "mmrl/algorithms/surrogates/trust.py", "mmrl/algorithms/surrogates/clips.py", "mmrl/algorithms/ratio.py"
TRUST, CLIPS, SURROGATES = ("joints/test_trust.py",), ("joints/test_clips.py",), ("joints/test_surrogates.py",)
S, K, P = "mmrl/terms/shapers/returns.py", "mmrl/terms/reward_kl.py", "mmrl/training/preparation.py"
D, RETURNS, TERMS = (
    "mmrl/algorithms/preference/discriminative.py",
    ("joints/test_returns.py",),
    ("joints/test_terms.py",),
)
PREFERENCE = ("joints/test_preference.py",)
N, FINDINGS = "mmrl/rewards/parsing/negation.py", ("rewards/test_findings.py",)
DIVERGENCE = ("joints/test_group_divergence.py",)
SUPPORT = ("joints/test_support.py",)
SECTION_TESTS = ("joints/test_sections.py",)
SOURCES = ("tasks/test_sources.py",)
INVERTED = "tasks/visual_qa/data/columns.py"
TEACHERS = "mmrl/measurements/teachers.py"
SECTIONS = "mmrl/measurements/sections.py"
VIEWS, MEASURED = ("prompts/test_views.py",), ("joints/test_measurements.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("query_trust_region: the price is differentiated", T,
     "return policy_gradient_values(detached.exp() * (advantages - price * detached), log_ratio), stats",
     "return -log_ratio.exp() * (advantages - price * log_ratio), stats", TRUST),
    ("query_trust_region: sign of the price", T, "(advantages - price * detached)", "(advantages + price * detached)", TRUST),
    ("query_trust_region: without the ratio", T, "policy_gradient_values(detached.exp() * (advantages", "policy_gradient_values((advantages", TRUST),
    ("sqrt_clip: no least bound", C, ".clamp(min=self.least)", ".clamp(min=0)", CLIPS),
    ("sqrt_clip: no largest bound", C, ".clamp(max=self.most)", "", CLIPS),
    ("sqrt_clip: root of the probability left out", C, "(-old_logp(micro, replay) / 2)", "(-old_logp(micro, replay))", CLIPS),
    ("sqrt_clip: bounds swapped", C, "1 - math.sqrt(self.low.value)", "1 - math.sqrt(self.high.value)", CLIPS),
    ("sqrt_clip: the cap is of both signs", C, "values.where(advantages >= 0, values.minimum(-self.cap * advantages))",
     "values.minimum(self.cap * advantages.abs() / 3)", CLIPS),
    ("sqrt_clip: the cap is fixed", C, "values.minimum(-self.cap * advantages)", "values.minimum(-2.0 * advantages)", CLIPS),
    ("group_expectation: unclipped", T, 'kind="clip", **self.bounds)\n        return values, stats | {"ratio"',
     'kind="unclipped")\n        return values, stats | {"ratio"', TRUST),
    ("group_expectation: rollouts count by length", T, "one_weight: ClassVar[bool] = True", "one_weight: ClassVar[bool] = False", TRUST),
    ("geometric: rollouts count by length", C, "one_weight: ClassVar[bool] = True", "one_weight: ClassVar[bool] = False", CLIPS),
    ("level: GSPO counts by length", R, 'self.level == "sequence" or ', "", SURROGATES),
    ("reduce: what is set is not used", R, "if self.reduce is not None:", "if False:", SURROGATES),
    ("unclipped: the sign of the ratio", "mmrl/core/surrogates.py", "return -log_ratio.exp() * a, {}", "return -(-log_ratio).exp() * a, {}", SURROGATES),
    ("unclipped: it is clipped", "mmrl/core/surrogates.py", '"unclipped": (_unclipped, {})', '"unclipped": (_reinforce, {})', TRUST),
    ("whitening: rollouts count alike", S, 'if self.over == "decisions":', "if False:", RETURNS),
    ("whitening: over is not used", S, 'if self.over == "decisions":', "if True:", RETURNS),
    ("whitening: the mean stays", S, "(advantages - values.mean())", "advantages", RETURNS),
    ("whitening: a variance for a deviation", S, "variance.rsqrt()", "1 / variance", RETURNS),
    ("whitening: what is not scored counts", S, "mask = batch.rollouts.mask & scored", "mask = batch.rollouts.mask", RETURNS),
    ("whitening: of this rank", S, "batch.gather_steps(*self._values_and_mask(advantages, mask))",
     "(lambda v, m: v[m])(*self._values_and_mask(advantages, mask))", ("joints/test_ranks.py",)),
    ("kl_returns: it pays the divergence out", S, "return advantages - penalties", "return advantages + penalties", RETURNS),
    ("kl_returns: a decision pays for itself alone", S, "discounted_returns(self.kl.costs(batch), self.gamma)", "self.kl.costs(batch)", RETURNS),
    ("kl_returns: never discounted", S, "self.kl.costs(batch), self.gamma", "self.kl.costs(batch), 1.0", RETURNS),
    ("kl_returns: what is not scored pays", S, "scored & batch.rollouts.mask", "batch.rollouts.mask", RETURNS),
    ("kl_penalty: of this rank", "mmrl/algorithms/reward_transforms/kl_penalty.py",
     "batch.gather(self.kl.costs(batch).sum(1).to(rewards))", "self.kl.costs(batch).sum(1).to(rewards)", ("joints/test_ranks.py",)),
    ("reward_kl: the estimator is fixed", K, "kind=self.estimator", 'kind="k1"', RETURNS),
    ("reward_kl: the two policies are exchanged", K, "kl_estimate(rollouts.old_logp, rollouts.ref_logp.to(rollouts.old_logp),",
     "kl_estimate(rollouts.ref_logp, rollouts.old_logp,", RETURNS),
    ("reward_kl: the coefficient is fixed", K, "self.coefficient.value * kl", "0.01 * kl", RETURNS),
    ("masks: what is masked leaves the denominator", P, 'if mask.of == "objective" and self.algorithm.weighs_decisions:', "if False:", TERMS),
    ("masks: a loss of groups ignores them", P, ' and self.algorithm.weighs_decisions:', ":", TERMS),
    ("masks: the objective keeps all", P, "replay.weight = included if", "replay.weight = replay.weight if", TERMS),
    ("discriminative: the divisor is fixed", D, 'if self.divisor == "contrasting":', "if False:", PREFERENCE),
    ("discriminative: divided by contrasting prompts", D, 'if self.divisor == "contrasting":', "if True:", PREFERENCE),
    ("discriminative: unscored prompts count", D, "micro.group[known].unique()", "micro.group.unique()", PREFERENCE),
    ("findings_named: denials are not read", N, "not _is_denied(text[: match.start()], text[match.end() :])", "True", FINDINGS),
    ("findings_named: denials reach over sentences", N, "_DENIED_BEFORE.search(before, begin)", "_DENIED_BEFORE.search(before)", FINDINGS),
    ("findings_named: denials behind are not read", N, " or _DENIED_AFTER.match(after)", "", FINDINGS),
    ("findings_named: what can not be ruled out is denied", N, '_PERHAPS.sub("perhaps", text)', "text", FINDINGS),
    ("findings_named: a phrase that is denied once is never named", N, "return any(not _is_denied", "return all(not _is_denied", FINDINGS),
    ("views: the step is left out", "mmrl/prompts/views.py", "zlib.crc32(prompt.id.encode()), self._step", "zlib.crc32(prompt.id.encode()), 0", VIEWS),
    ("views: one of the first step at replay", "mmrl/measurements/responses.py", "partial(view.changed, step=step)", "partial(view.changed, step=0)", MEASURED),
    ("papo: likelihoods under the view have a gradient", "mmrl/terms/losses/kl.py", "        if self.gradient:\n", "        if False:\n", TERMS),
    ("prorl: the optimizer goes on", P, "self.engine.reset_optimizer()", "pass", ("joints/test_steps.py",)),
    ("prorl: the option is not read", "mmrl/terms/losses/kl.py", "resets if self.reset_optimizer else frozenset()", "resets", ("joints/test_steps.py",)),
    ("prorl: counts of steps stay", "mmrl/engine/deepspeed.py", "value.zero_() if isinstance(value, Tensor) else 0",
     'value.zero_() if name != "step" else value', ("joints/test_optimizer.py",)),
    ("prorl: moments stay", "mmrl/engine/deepspeed.py", "value.zero_() if isinstance(value, Tensor) else 0",
     'value.zero_() if name == "step" else value', ("joints/test_optimizer.py",)),
    ("signal_correction: all groups have a signal", "mmrl/terms/shapers/groups.py", "/ max(num_with_signal, 1)", "/ max(len(rewards), 1)", RETURNS),
    ("ppo: the divergence is paid out", "mmrl/algorithms/ppo.py", "rewards = rewards - penalties", "rewards = rewards + penalties", ("joints/test_ppo.py",)),
    ("kl: k1 is not told", "mmrl/terms/losses/kl.py", "if self.estimator != \"k1\" or not", "if True or not", TERMS),
    ("kl: k1 is told of every policy", "mmrl/terms/losses/kl.py", "not isinstance(self.against, ReferencePolicy) or", "", TERMS),
    ("proportional: 0 can be reached", "mmrl/schedules/controllers.py", "low or sys.float_info.min", "low", ("schedules/test_controllers.py",)),
    ("follower: the wrong bound is named", "mmrl/schedules/schedule.py", "key = \"low\" if low < ge", "key = \"high\" if low < ge", ("schedules/test_controllers.py",)),
    ("divergence_weight: rollouts that ended are left out", "mmrl/core/credit.py", "logp[rows].where(mask[rows][..., None], -math.log(vocabulary))", "logp[rows]", DIVERGENCE),
    ("divergence_weight: uniform over a block", "mmrl/measurements/responses.py", "rollouts.group, len(ids))", "rollouts.group, len(some))", DIVERGENCE),
    ("divergence_weight: the other difference", "mmrl/core/credit.py", "(filled.mean(0) - filled).clamp(-11, 11)", "(filled - filled.mean(0)).clamp(-11, 11)", DIVERGENCE),
    ("divergence_weight: no bound", "mmrl/core/credit.py", "(filled.mean(0) - filled).clamp(-11, 11)", "(filled.mean(0) - filled)", DIVERGENCE),
    ("divergence_weight: the last block counts", "mmrl/measurements/responses.py", "divergence += divergence_in_group", "divergence = divergence_in_group", DIVERGENCE),
    ("divergence_weight: groups are one", "mmrl/measurements/responses.py", "rollouts.mask, rollouts.group, len(ids)", "rollouts.mask, 0 * rollouts.group, len(ids)", DIVERGENCE),
    ("divergence_weight: the range of all groups", "mmrl/measurements/responses.py", "rollouts.mask, rollouts.group)\n        return 1", "rollouts.mask, 0 * rollouts.group)\n        return 1", DIVERGENCE),
    ("divergence_weight: the range of padding too", "mmrl/measurements/responses.py", "rollouts.mask, rollouts.group)\n        return 1", "rollouts.mask | True, rollouts.group)\n        return 1", DIVERGENCE),
    ("divergence_weight: no weight below 1", "mmrl/measurements/responses.py", "return 1 + (max_weight - 1) * scaled", "return max_weight * scaled", DIVERGENCE),
    ("divergence_weight: the weight is added", "mmrl/terms/shapers/groups.py", "return advantages * self.divergence", "return advantages + self.divergence", DIVERGENCE),
    ("kl: the weights of divergence are 1.4 at most", "mmrl/terms/losses/kl.py", "token_weights(batch, self.max_weight)", "token_weights(batch, 1.4)", DIVERGENCE),
    ("inversion: the right letters are asked for", INVERTED, "if letter not in right]:", "if letter in right]:", SOURCES),
    ("inversion: the question stays", INVERTED, "merged[problem] += INVERSION", "pass", SOURCES),
    ("inversion: every question", INVERTED, "< self.inverted * 2**32", "<= self.inverted * 2**40", SOURCES),
    ("inversion: held-out questions too", "tasks/visual_qa/settings.py", "opened(self.eval, True)", "opened(self.eval, False)", SOURCES),
    ("support: tokens are the sampling policy's", TEACHERS, "with context.weights(self.weights_used):", "with context.weights(\"sampling\"):", SUPPORT),
    ("support: likelihoods are the sampling policy's", TEACHERS, "context.replayed(changed, name, self.weights_used)", "context.replayed(changed, name, \"sampling\")", SUPPORT),
    ("support: of positive advantages", "mmrl/terms/losses/support.py", "micro.advantages < 0", "micro.advantages > 0", SUPPORT),
    ("support: it is left", "mmrl/terms/losses/support.py", "values = -self.coefficient.value", "values = self.coefficient.value", SUPPORT),
    ("support: the likeliest may be out of it", "mmrl/core/regularizers.py", " | (reference >= reference.amax(-1, keepdim=True))", "", SUPPORT),
    ("support: the bound is not read", "mmrl/core/regularizers.py", "(reference.exp() >= min_probability)", "(reference.exp() >= 0)", SUPPORT),
    ("sections: the first end anywhere", SECTIONS, "text.find(end, first + len(begin))", "text.find(end)", SECTION_TESTS),
    ("sections: without their ends", SECTIONS, "len(text) if last < 0 else last + len(end)", "len(text) if last < 0 else last", SECTION_TESTS),
    ("sections: the sum where there are several", "mmrl/terms/shapers/sections.py", "total / count.clamp(min=1)", "total", SECTION_TESTS),
    ("sections: nothing elsewhere", "mmrl/terms/shapers/sections.py", ".where(count > 0, advantages)", ".where(count > 0, 0)", SECTION_TESTS),
    ("sections: the weights of the task", "mmrl/terms/shapers/segments.py", "weights=torch.tensor(list(weights.values()))", "weights=batch.reward_weights[columns]", SECTION_TESTS),
]
