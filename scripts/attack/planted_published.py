"""Faults of methods that are compared with their released code. A name, a file, a text that it holds once, what takes its
place, and the tests that could notice."""

from __future__ import annotations

T, C, R = "mmrl/algorithms/surrogates/trust.py", "mmrl/algorithms/surrogates/clips.py", "mmrl/algorithms/ratio.py"
TRUST, CLIPS, SURROGATES = ("joints/test_trust.py",), ("joints/test_clips.py",), ("joints/test_surrogates.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("query_trust_region: the price is differentiated", T,
     "return weighted(moved.exp() * (advantages - price * moved), log_ratio), stats",
     "return -log_ratio.exp() * (advantages - price * log_ratio), stats", TRUST),
    ("query_trust_region: sign of the price", T, "(advantages - price * moved)", "(advantages + price * moved)", TRUST),
    ("query_trust_region: without the ratio", T, "weighted(moved.exp() * (advantages", "weighted((advantages", TRUST),
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
    ("reduce: what is set is not used", R, 'return self.reduce or ("sequence_mean"', 'return ("sequence_mean"', SURROGATES),
    ("unclipped: the sign of the ratio", "mmrl/core/surrogates.py", "return -log_ratio.exp() * a, {}", "return -(-log_ratio).exp() * a, {}", SURROGATES),
    ("unclipped: it is clipped", "mmrl/core/surrogates.py", '"unclipped": (_unclipped, {})', '"unclipped": (_reinforce, {})', TRUST),
]
