"""Faults of the order of a step, and of what could not be scored. A name, a file, a text that it holds once, what takes
its place, and the tests that could notice."""

from __future__ import annotations

C, A = "mmrl/collection/", "mmrl/algorithms/"
ORDER, PPO, BASELINES = ("joints/test_step_order.py",), ("joints/test_ppo.py",), ("joints/test_baselines.py",)
COMPONENTS, FACTS = ("joints/test_components.py",), ("joints/test_facts.py",)
CORRECTIONS = ("joints/test_corrections.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("order: ppo takes the unscored for 0", A + "ppo.py", "steps.mask & ~total.isnan()[:, None]",
     "steps.mask; total = total.nan_to_num(0.0)", PPO),
    ("order: unscored advantages are standardised in minibatches", A + "ppo.py",
     "micro.mask & _by_decision(_steps(micro).mask, micro)", "micro.mask", PPO),
    ("order: samplers hear of a step's last round", C + "collector.py", "self.pending.observe(self._outcomes(batch, batch.rewards))",
     "pass", ORDER),
    ("order: outcomes of this rank alone", C + "collector.py", "for part in self.ranks.gather(rows) for row in part)",
     "for row in rows)", ORDER),
    ("order: what was heard meanwhile is not in the checkpoint", C + "pending_batches.py",
     "for outcome in self.observed]", "for outcome in []]", ORDER),
    ("order: what was heard meanwhile is not heard again", C + "draws.py", 'state.get("observed", [])', "[]", ORDER),
    ("order: groups are judged before they are rescued", C + "collector.py", "informative = self._informative(batch, filters)",
     "informative = torch.cat([self._informative(fresh, filters), torch.zeros(len(batch) - len(fresh), dtype=torch.bool)])", ORDER),
    ("order: rescued groups lose what rescued them", C + "collector.py", "candidates.add(batch, informative)",
     "candidates.add(fresh, informative[: len(fresh)])", ORDER),
    ("order: every source is asked in every round", C + "extra_sources.py", "[source for source in self.sources if source.in_group]",
     "self.sources", ORDER),
    ("order: ranks are not filled up after the filter", C + "extra_sources.py", "missing = self._most(len(rollouts)) - len(rollouts)",
     "missing = 0", ORDER),
    ("order: rounds without replays are not completed", C + "dynamic_sampling.py",
     "[with_old_logp(part) for part in self.parts] if recorded else self.parts", "self.parts", ORDER),
    ("order: an unjudged group has failed", C + "extra_sources.py", "if len(known) and not bool(", "if not bool(", ORDER),
    ("order: a group without two scores is flat", "mmrl/prompts/curriculum.py", "if len(scored) > 1:", "if True:", ORDER),
    ("order: a lone score has a gap", "mmrl/prompts/mixture.py", "if len(scored) > 1:", "if scored:", ORDER),
    ("order: flat groups of momentum are dropped", "mmrl/collection/collector.py", "if algorithm.learns_from_flat_groups:",
     "if False:", ORDER),
    ("order: a filter that drops nothing is taken", A + "algorithm.py", "filters.low is filters.high is None", "False", ORDER),
    ("scales: batch_std of every baseline", A + "grouped.py", "kind_of(Scale, kind.usual_scale)()", 'kind_of(Scale, "batch_std")()',
     BASELINES),
    ("scales: a scale that is given is overlooked", A + "grouped.py", 'or "scale" in values or', "or", BASELINES),
    ("scales: a group of one is divided by its deviation", A + "grouped.py", "if self.scale.of_group and config.group_size < 2:",
     "if False:", BASELINES),
    ("gates: closed elsewhere", "mmrl/build.py", 'update={"elsewhere": 1.0}', 'update={"elsewhere": 0.0}', COMPONENTS),
    ("gates: every reward pays elsewhere", "mmrl/build.py", "if spec.column in gates and spec.elsewhere is None",
     "if spec.elsewhere is None", COMPONENTS),
    ("gates: a value for elsewhere is overlooked", "mmrl/build.py", "if spec.column in gates and spec.elsewhere is None",
     "if spec.column in gates", COMPONENTS),
    ("facts: calls that failed are errors and no calls", "mmrl/protocols/batch.py", "lambda turn: turn.tool is not None",
     "lambda turn: turn.tool is not None and turn.error is None", FACTS),
    ("facts: tokens of the whole conversation", "mmrl/protocols/batch.py",
     "rollouts.mask.sum(-1) / _turns(rollouts, lambda turn: True)", "rollouts.mask.sum(1).float()", FACTS),
    ("facts: a lost conversation has turns", "mmrl/protocols/batch.py", 'talk is None or talk.end == "lost"', "talk is None", FACTS),
    ("facts: a lost conversation's turns earn 0", "mmrl/policies/vlm/turns.py", 'draft.dialogue.end != "lost") for draft in drafts]',
     "True) for draft in drafts]", FACTS),
    ("facts: nobody asks who fills them in", "mmrl/build.py", "for fact in needs.facts]", "for fact in ()]", FACTS),
    ("facts: what is equal in a group makes strata", "mmrl/protocols/facts.py", "elif fact.varies and (", "elif False and (", FACTS),
    ("facts: an unknown accuracy is 0", "mmrl/algorithms/scales/quantile_buckets.py", ".where(known, self.count)", ".where(known, 0)",
     FACTS),
    ("facts: a gate without a score is closed", "mmrl/terms/shapers/turns.py", "counted & ~gate.isnan()", "counted", FACTS),
    ("corrections: the whole is scored", C + "self_correction.py", "task.score(answers, joined.group)",
     "task.score(joined.samples, joined.group)", CORRECTIONS),
    ("corrections: the whole is judged", C + "self_correction.py", "task.accuracy(answers)", "task.accuracy(joined.samples)",
     CORRECTIONS),
    ("corrections: the first response is scored", C + "self_correction.py", "strict=True)\n        ]\n        joined.rewards",
     "strict=True)\n        ]\n        answers = [replace(s, response=fresh.samples[r].response) for s, r in zip(answers, first.tolist())]\n        joined.rewards",
     CORRECTIONS),
]
