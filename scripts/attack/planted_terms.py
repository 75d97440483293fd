"""Faults of terms with options, of advantages by entropy, and of how former kinds are told and rewritten. Each entry
has a name, a file, a string that occurs once in the file, its replacement, and the tests that should then fail."""

from __future__ import annotations

K, L, E = "mmrl/terms/losses/kl.py", "mmrl/terms/losses/likelihood.py", "mmrl/terms/shapers/entropy.py"
M, J, S, F = "mmrl/moved.py", "mmrl/moved.json", "mmrl/settings/section.py", "mmrl/cli/former_kinds.py"
MORE, SHAPERS, FORMER = ("joints/test_more_terms.py",), ("joints/test_shapers.py",), ("cli/test_former_kinds.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("kl: directions swapped", K, 'if self.direction == "forward":', 'if self.direction != "forward":', MORE),
    ("kl: reverse without its weights", K, 'if self.direction == "unweighted" else', 'if self.direction == "reverse" else', MORE),
    ("kl: forward looks back", K, "kl_estimate(old, logp, kind=estimator)", "kl_estimate(logp, old, kind=estimator)", MORE),
    ("kl: the old policy is the reference", K, "        return old_logp(micro, replay)\n", "        return 0 * old_logp(micro, replay)\n", MORE),
    ("kl: decay is hard-coded", K, "frozenset({self.decay})", "frozenset({0.9})", MORE),
    ("kl: the reference is never taken anew", K, "| Needs(reference=reference)", "| Needs()", ("joints/test_steps.py",)),
    ("kl: steps are compared with whoever", K, "if self.estimator not in self.against.estimators:", "if False:", MORE),
    ("kl: difficulty frees wrong answers", K, "(rollouts.advantages > 0) & ", "", MORE),
    ("kl: difficulty without e", K, "torch.exp(-math.e * accuracy)", "torch.exp(-accuracy)", MORE),
    ("kl: all right is hard", K, "(accuracy > 0) & (accuracy < 1)", "(accuracy > 0)", MORE),
    ("kl: share is hard-coded", K, "int(self.share * len(ranked))", "int(2e-4 * len(ranked))", MORE),
    ("kl: share of this rank", K, "batch.gather_decisions(covariance)", "covariance[rollouts.mask]", MORE),
    ("kl: advantages are not centred", K, "(rollouts.advantages - advantages.mean())", "rollouts.advantages", MORE),
    ("kl: weights are left out", K, "(weights * values).where", "values.where", MORE),
    ("kl: the metric is of all decisions", K, "kl.where(weights != 0, torch.nan)", "kl", MORE),
    ("likelihood: the view is left out", L, "replay.logp if self.under is None else", "replay.logp if True else", MORE),
    ("likelihood: all are demonstrations", L, 'if self.of == "all":', "if False:", MORE),
    ("sure: its mean is not 1", E, "return weight / batch.gather_decisions(weight).mean()", "return weight", SHAPERS),
    ("sure: k is hard-coded", E, "(-self.k * scaled_entropy(batch, self.unit)).exp()", "(-scaled_entropy(batch, self.unit)).exp()", SHAPERS),
    ("clarity: of the decision itself", E, ".roll(-1, 1)", "", SHAPERS),
    ("clarity: the last has one", E, ".where(has_next, 0)", "", SHAPERS),
    ("doubt: bounded by what sureness had not touched", E, "self.bonus.bonus(shaped, batch)",
     "self.bonus.bonus(advantages, batch)", SHAPERS),
    ("entropy: never centred", E, "if self.centred:", "if False:", SHAPERS),
    ("former: a kind is told as any unknown one", S, "if current := current_forms(base, tree):", "if current := []:", FORMER),
    ("former: what is gone is not named", S, "[name for name in tree if name not in current[0]]", "[]", FORMER),
    ("former: a default of its own is forgotten", M, 'else json.loads(default or "null")', "else None", FORMER),
    ("former: a default wins", M, "tree[key] if tree.get(key) is not None else", "tree[key] if not default else", FORMER),
    ("former: other keys are lost", M, "if len(templates) == 1 else {}", "if False else {}", FORMER),
    ("former: a present kl is a former one", M, "if not used & tree.keys() and", "if False and", FORMER),
    ("former: what is null is written", M, "if inner is not None}", "}", FORMER),
    ("former: a choice by a value is any other", M, 'template[first_key].get(value, template[first_key].get("*"))', 'template[first_key].get("*")',
     FORMER),
    ("former: the coefficient of ema_kl", J, '"$coefficient|0.1"', '"$coefficient|0.01"', FORMER),
    ("former: covariance_kl looks forward", J, '"direction": "unweighted"', '"direction": "forward"', FORMER),
    ("former: the discount of decoupled_ppo", J, '"$gamma|1.0"', '"$gamma|0.99"', FORMER),
    ("rewriting: an anchor is rewritten twice", F, "edits = set(", "edits = list(", FORMER),
    ("rewriting: items by number are passed over", F, "key if name.value.isdigit() else name.value", "name.value", FORMER),
    ("rewriting: two where there is room for one", F, "if len(current := _current_trees(value, key)) > 1:", "if False:", FORMER),
    ("rewriting: the second of two is lost", F, "_current_trees(child, key)[1:]", "_current_trees(child, key)[2:]", FORMER),
    ("rewriting: a block ends behind its comments", F, "return _end(node.value[-1][1])", "return node.end_mark.index", FORMER),
    ("rewriting: a comment goes with the next key", F, 'self._text.rfind("\\n", 0, first.start_mark.index)',
     "_end(node.value[numbers[0] - 1][1])", FORMER),
]
