"""Faults of credit by step: values over traces, branches of denoising steps, regions of edits, parts of masked
responses. A name, a file, a text that it holds once, what takes its place, and the tests that could notice."""

from __future__ import annotations

M = "mmrl/policies/masked/"
BRANCH, CANDIDATES = "mmrl/terms/branch_credit.py", "mmrl/policies/diffusion/candidates.py"
BRANCHES = ("joints/test_branch_credit.py",)
PARTS = ("policies/masked/test_parts.py",)
REGION = ("policies/diffusion/test_region.py",)
TRACE, CRITIC = ("joints/test_trace_ppo.py",), ("policies/masked/test_critic.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("trace_ppo: a token's value is that of its step", "mmrl/algorithms/ppo.py", "(advantages + more - apart)",
     "(advantages + more)", TRACE),
    ("trace_ppo: a token's own value counts the other way", "mmrl/algorithms/ppo.py", "(advantages + more - apart)",
     "(advantages + more + apart)", TRACE),
    ("trace_ppo: steps earn sums", "mmrl/core/credit.py",
     "added / blank.scatter_add(1, number, mask.to(values)).clamp(min=1)", "added", TRACE),
    ("trace_ppo: time goes from left to right", "mmrl/algorithms/ppo.py", "if steps.moment is None else",
     "if True else", TRACE),
    ("trace_ppo: the last place earns, whenever it was filled", "mmrl/algorithms/ppo.py",
     "last = when == there.sum(1, keepdim=True) - 1",
     "last = torch.arange(steps.mask.shape[1]) == steps.mask.sum(1, keepdim=True) - 1", TRACE),
    ("trace_ppo: gaps in time stay", "mmrl/core/credit.py", "moment[row, mask[row]].unique(return_inverse=True)",
     "(0, moment[row, mask[row]])", TRACE),
    ("trace_ppo: what the policy says of time is lost", "mmrl/preparation.py", 'value.cpu(), old.column("moment")',
     "value.cpu()", TRACE),
    ("masked critic: the value of the next state", M + "likelihoods.py",
     "return states.weight.argmax(0) if states.order", "return states.weight.argmax(0) + 1 if states.order", CRITIC),
    ("masked critic: values are added up with the likelihood's weights", M + "policy.py", "scored[-1] * (w / total)",
     "scored[-1] * (2 * w)", CRITIC),
    ("masked critic: it reads an inner layer", M + "policy.py", "found.hidden_states[-1][place]",
     "found.hidden_states[-2][place]", CRITIC),
    ("masked critic: it is not saved", M + "policy.py",
     "        if self.module.critic is not None:\n            write_critic(folder, state)\n", "", CRITIC),
    ("masked critic: any likelihood will do", M + "settings.py", "if not unmasking.likelihood.of_trace:", "if False:",
     CRITIC),
    # --- branches ---
    ("branch_credit: the trunk is drawn, too", CANDIDATES,
     "segment(x, prompts, roots, none, at,", "segment(x, prompts, roots, [[p] for p in at], at,", BRANCHES),
    ("branch_credit: a candidate goes on", CANDIDATES, 'if trunk == "ode":', "if False:", BRANCHES),
    ("branch_credit: the trunk of the settings is not looked at", "mmrl/policies/diffusion/policy.py",
     "group_size, last, likelihood.trunk)", "group_size, last)", BRANCHES),
    ("branch_credit: good steps become unlikely", BRANCH, "+ self.weight * own", "- self.weight * own", BRANCHES),
    ("branch_credit: what was not scored takes part", BRANCH, "known = ~worth.isnan() & batch", "known = batch",
     BRANCHES),
    ("branch_credit: scale is hard-coded", BRANCH, "scale=self.scale", 'scale="none"', BRANCHES),
    ("branch_credit: the whole rollout's advantage is lost", BRANCH, "self.outcome * advantages", "0 * advantages",
     BRANCHES),
    # --- regions ---
    ("region: bad edits keep what should stay", "mmrl/terms/region.py", "self.keep.value * good * kept",
     "self.keep.value * (1 - good) * kept", REGION),
    ("region: edits are driven to the source", "mmrl/terms/region.py", "(self.far - changed)", "(changed - self.far)",
     REGION),
    ("region: what should change stays", "mmrl/terms/region.py", "masked_distance(data, source, 1 - changes)",
     "masked_distance(data, source, changes)", REGION),
    ("region: one pixel in four is enough to stay", "mmrl/terms/region.py", "F.adaptive_max_pool2d",
     "F.adaptive_avg_pool2d", REGION),
    ("region: distances are sums", "mmrl/core/regularizers.py", "added / weight.flatten(2).sum(2).clamp(min=1)",
     "added", REGION),
    ("region: the noise is taken for the velocity", "mmrl/core/contrast.py",
     "estimate / signal if matching.noise_space else estimate", "estimate", REGION),
    ("region: all pictures have the first one's source", "mmrl/policies/diffusion/policy.py",
     '[condition["source"] for condition in told]', '[told[0]["source"] for condition in told]', REGION),
    ("region: the whole picture may change", "tasks/image_generation/edits.py", "(before != wanted).any(0)",
     "(before != wanted).any(0) | True", REGION),
    # --- text and pictures of one masked model ---
    ("masked parts: codes may stand in text", M + "policy.py", ".where(codes[:, None], logits)", "", PARTS),
    ("masked parts: what stands behind the text's end counts", M + "policy.py", "ends.cumsum(1) - ends == 0", "True",
     PARTS),
    ("masked parts: text is codes, and codes are text", M + "policy.py",
     "torch.full_like(place, PICTURE).where(place >= self.text_length, TEXT)",
     "torch.full_like(place, TEXT).where(place >= self.text_length, PICTURE)", PARTS),
    ("masked parts: codes are written beside the text", M + "schedule.py", "Step(text + step.start,",
     "Step(step.start,", PARTS),
    ("masked parts: texts of demonstrations have no end", M + "policy.py",
     "ids + [end] * (self.text_length - len(ids))", "ids + [ids[-1]] * (self.text_length - len(ids))", PARTS),
    ("spread: all states are of one density", M + "likelihoods.py", "torch.arange(draws) / draws) % 1",
     "torch.zeros(draws)) % 1", PARTS),
    ("spread: nothing is asked about", M + "likelihoods.py", " | (chance == chance.amin(1, keepdim=True))", "", PARTS),
    ("spread: densities beyond 1", M + "likelihoods.py", "torch.arange(draws) / draws) % 1",
     "torch.arange(draws) / draws)", PARTS),
    ("spread: places count by how often they are empty", M + "likelihoods.py", "empty / empty.sum(0).clamp(min=1)",
     "empty / draws", PARTS),
]
