"""Faults of implicit process rewards. Entries are as in `planted_spans.py`."""

from __future__ import annotations

M, C = "mmrl/measurements/implicit.py", "mmrl/core/credit.py"
S, A = "mmrl/terms/shapers/implicit.py", "mmrl/protocols/auxiliary.py"
IMPLICIT = ("whole_runs/test_implicit_process.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("implicit: the log-ratio has the other sign", M, "self.beta * (logp - reference)", "self.beta * (reference - logp)", IMPLICIT),
    ("implicit: beta is left out", M, "return self.beta * (", "return (", IMPLICIT),
    ("implicit: the mean of the tokens is judged", M, "outcome_loss(values.sum(1), labels)", "outcome_loss(values.mean(1), labels)", IMPLICIT),
    ("implicit: the loss is a sum", M, "/ count.to(values.device).clamp(min=1)", "/ 1", IMPLICIT),
    ("implicit: right is wrong", M, "outcome.where(known, 0).to(logits)", "1 - outcome.where(known, 0).to(logits)", IMPLICIT),
    ("implicit: the unknown are wrong", M, "weight=known.to(logits), ", "", IMPLICIT),
    ("implicit: fillers teach", M, "known = known & ~rollouts.filler", "known = known & True", IMPLICIT),
    ("implicit: it always scores after it has learned", M, 'if self.updates == "before":', "if True:", IMPLICIT),
    ("implicit: it never scores after it has learned", M, 'if self.updates == "before":', "if False:", IMPLICIT),
    ("implicit: the policy itself is trained", M, "lambda: copy.deepcopy(policy.module)", "lambda: policy.module", IMPLICIT),
    ("implicit: any outcome passes", M, "        if len(invalid):\n", "        if len(invalid) < 0:\n", IMPLICIT),
    ("implicit: the others are all", C, "(means[rows].sum() - means[rows]) / num_others", "means[rows].mean().expand(len(rows))", IMPLICIT),
    ("implicit: the baseline is of sums", C, "means = masked_rewards.sum(1) / mask.sum(1).clamp(min=1)", "means = masked_rewards.sum(1)", IMPLICIT),
    ("implicit: the baseline is paid after the end", C, "return discounted_returns(differences.where(mask, 0), gamma)", "return discounted_returns(differences, gamma)", IMPLICIT),
    ("implicit: no discount", C, "return discounted_returns(differences.where(mask, 0), gamma)", "return discounted_returns(differences.where(mask, 0), 1.0)", IMPLICIT),
    ("implicit: the outcome is left out", S, "return self.outcome * advantages + self.weight * process", "return self.weight * process", IMPLICIT),
    ("implicit: the weight is left out", S, "self.weight * process", "process", IMPLICIT),
    ("implicit: the released baseline is not scaled", C, "- means[rows].mean()) * len(rows) / num_others", "- means[rows].mean())", IMPLICIT),
    ("implicit: the largest reward, not return", S, "discounted_returns(rewards, 1.0).abs().amax(1)", "rewards.abs().amax(1)", IMPLICIT),
    ("implicit: no rewards are divided", S, "if self.normalise:", "if False:", IMPLICIT),
    ("modules: gradients stay on their rank", A, "total(local.to(weight))", "local.to(weight)", IMPLICIT),
    ("modules: gradients of a step before count", A, "        self.module.zero_grad()\n", "", IMPLICIT),
    ("modules: rounded weights begin anew", A, 'weight.copy_(state["weights"][str(i)])', "weight.copy_(weight)", IMPLICIT),
    ("modules: Adam moves rounded weights", A, "p.detach().float().requires_grad_() if self.has_master_weights else p", "p", IMPLICIT),
    ("implicit: ZeRO-3 passes", "mmrl/config.py", "measured.trains_copy for measured", "False for measured", IMPLICIT),
    ("implicit: a copy has no moments", "mmrl/doctor/memory_plan.py", "(bytes_per_weight + 8 + ", "(bytes_per_weight + ", IMPLICIT),
    ("modules: a single loss moves nothing", A, "self.descend([loss], lambda gradient: gradient)", "self.descend([loss], lambda gradient: 0 * gradient)", IMPLICIT),
]
