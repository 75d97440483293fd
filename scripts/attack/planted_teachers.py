"""Faults of distillation: divergences, what a teacher reads, its server, and what is refused before the start."""

from __future__ import annotations

C, D, M = "mmrl/core/regularizers.py", "mmrl/terms/losses/distillation.py", "mmrl/measurements/teachers.py"
S, V = "mmrl/measurements/teacher_server.py", "mmrl/policies/vlm/responses/teachers.py"
A, L = "mmrl/policies/vla/teachers.py", "mmrl/policies/vla/loading.py"
CORE, TOKENS, STEPS, ACTIONS = (
    ("core/test_distillation.py",),
    ("whole_runs/test_teachers.py",),
    ("whole_runs/test_image_teachers.py",),
    ("whole_runs/test_action_teachers.py",),
)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("teachers: the directions are exchanged", C, '(student, teacher) if direction == "reverse"', '(teacher, student) if direction == "reverse"', CORE),
    ("teachers: the rest is left out", C, "if not complete:\n        student, teacher = (torch.cat", "if complete and False:\n        student, teacher = (torch.cat", CORE),
    ("teachers: samples without a ratio", C, "values = (logp - old_logp).clamp(-BOUND, BOUND).exp() * difference.detach().clamp(-BOUND, BOUND)",
     "values = logp * difference.detach().clamp(-BOUND, BOUND)", CORE),
    ("teachers: a forward sample has the other sign", C, "values = -(teacher - old_logp)", "values = (teacher - old_logp)", CORE),
    ("teachers: the coefficient is left out", D, "return self.coefficient.value * values, statistics", "return values, statistics", TOKENS),
    ("teachers: prompts without a teacher are taught", D, "return values.where(known, 0), estimate.where(known, torch.nan)",
     "return values.where(known, 1), estimate", TOKENS),
    ("teachers: a view of the prompt is forgotten", M, "changed: Rollouts = context.policy.view(rollouts, bind_step(self.view, context.step))",
     "changed: Rollouts = rollouts", TOKENS),
    ("teachers: by tag, all rows are one teacher's", M, "has_tag = torch.tensor([str(prompt_tag) == tag for prompt_tag in tags])", "has_tag = torch.tensor([True for prompt_tag in tags])", TOKENS),
    ("teachers: micro-batches are not put back in order", M, "result[rows] = values.float().cpu()", "result[rows.sort().values] = values.float().cpu()", TOKENS),
    ("teachers: a teacher may say what the student may not", V, "module.suppressed = torch.tensor(suppressed", "module.suppressed = torch.tensor(suppressed[:1]", TOKENS),
    ("teachers: vocabularies are not compared", V, "    if teacher_ids == student_ids:\n", "    if len(student_ids):\n", TOKENS),
    ("server: entries of the prompt are taken for the response's", S, "positions = entries[len(prompt) :]", "positions = entries[1 : 1 + len(response)]", TOKENS),
    ("server: choices are taken in the order in which they come", S, "row = batch[choice[\"index\"]]", "row = batch[choices.index(choice)]", TOKENS),
    ("server: the least likely are listed", S, "key=entry.__getitem__, reverse=True)[:count]", "key=entry.__getitem__)[:count]", TOKENS),
    ("server: another tokenizer is not noticed", S, "if teacher_ids != student_ids:", "if not teacher_ids:", TOKENS),
    ("teachers of steps: the student's guidance", M, "teacher = context.policy.teachers.policy(self.folder, self.guidance)\n        changed = rollouts if viewed",
     "teacher = context.policy.teachers.policy(self.folder, None)\n        changed = rollouts if viewed", STEPS),
    ("teachers of steps: a reference is overwritten", M, "if rollouts.ref_prediction is not None:", "if rollouts.ref_prediction is None and False:", STEPS),
    ("teachers of actions: a head of the student's size", A, 'return action.model_copy(update={"head": with_sizes(action.head, saved["head"])})', "return action", ACTIONS),
    ("teachers of actions: any decisions will do", A, "if theirs != ours:", "if False:", ACTIONS),
    ("teachers of actions: another backbone is not noticed", A, "    if differing:\n", "    if False:\n", ACTIONS),
    ("teachers of actions: another robot is not noticed", A, "if not np.allclose(", "if False and not np.allclose(", ACTIONS),
    ("teachers of actions: guidance is ignored", A, "if guidance is not None:", "if False:", ACTIONS),
    ("teachers of actions: stored outputs are given to a teacher", A, "if self.taught.caches_prefixes:", "if False:", ACTIONS),
    ("teachers of actions: the student teaches itself", L, "teacher_actions(config.section(\"action\"), path),", "config.section(\"action\"),", ACTIONS),
    ("teachers of actions: a head that no run trained teaches", A, "if not (Path(path) / CONFIG).is_file() and has_own_weights(self.head):", "if False:", ACTIONS),
    ("teacher ratio: the anchor has the other sign", "mmrl/algorithms/ratio.py", "differences - anchor, mask", "differences + anchor, mask", TOKENS),
    ("teacher ratio: the anchor's level is hard-coded", "mmrl/algorithms/ratio.py", "differences - anchor, mask, level=self.level", 'differences - anchor, mask, level="decision"', TOKENS),
    ("teacher ratio: the share is hard-coded", "mmrl/algorithms/surrogates/teacher_ratio.py", "return self.share.value * ", "return 0.5 * ", TOKENS),
    ("teacher ratio: prompts without a teacher have one", "mmrl/algorithms/surrogates/teacher_ratio.py", "(likelihoods - old).where(~likelihoods.isnan(), 0)", "likelihoods.nan_to_num(0) - old", TOKENS),
    ("teachers: a random view is that of step 0", M, "bind_step(self.view, context.step)", "bind_step(self.view, 0)", TOKENS),
]
