"""Faults of Q networks that learn from recorded policy steps. Each entry has a name, a file, a string that occurs once
in the file, its replacement, and the tests that should then fail."""

from __future__ import annotations

M, V = "mmrl/measurements/q_values.py", "mmrl/core/values.py"
T, P = "mmrl/protocols/trajectory.py", "mmrl/policies/vla/off_policy.py"
W, A = "mmrl/terms/losses/q_weighted.py", "mmrl/algorithms/recorded/q_learning.py"
R, E = "mmrl/collection/stored_steps/ring.py", "tasks/manipulation/episodes.py"
Q, STORED = ("joints/test_q_weighted.py",), ("collection/test_stored_steps.py",)
G = ("joints/test_q_policy_gradient.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("q: the largest target counts", V, "for network in self.targets]).amin(0)", "for network in self.targets]).amax(0)", Q),
    ("q: targets do not follow", V, "target.lerp_(online, tau)", "pass", Q),
    ("q: targets follow at once", V, "target.lerp_(online, tau)", "target.copy_(online)", Q),
    ("q: targets are trained too", V, "copy.deepcopy(self.online).requires_grad_(False)", "copy.deepcopy(self.online)", Q),
    ("q: members are equal", V, "ValueNetwork(inputs, width, seed + member, layer_norm=True)", "ValueNetwork(inputs, width, seed, layer_norm=True)", Q),
    ("q: no end of an episode", V, "(discount * next_value).where(~terminated, 0)", "discount * next_value", Q),
    ("q: an end everywhere", V, "(discount * next_value).where(~terminated, 0)", "(discount * next_value).where(terminated, 0)", Q),
    ("q: targets with the online networks", V, "torch.stack([network(x) for network in self.targets])", "torch.stack([network(x) for network in self.online])", Q),
    ("q: V learns the other expectile", M, "target - value.module(transitions.observation), self.settings.expectile", "value.module(transitions.observation) - target, self.settings.expectile", Q),
    ("q: V of the observation before", M, "value.predict(transitions.next_observation)", "value.predict(transitions.observation)", Q),
    ("q: estimates of V of the next observation", M, "[target, value.predict(transitions.observation), td_error]", "[target, value.predict(transitions.next_observation), td_error]", Q),
    ("q: steps without a target count", M, "transitions.copies.where(known, 0)", "transitions.copies", Q),
    ("q: a step drawn twice counts once, for V", M, "(transitions.copies * error).sum()", "error.sum()", Q),
    ("q: a step drawn twice counts once, for Q", M, "(copies * errors).sum() / count", "errors.where(known, 0).sum() / count", Q),
    ("q: the mean of one rank", M, "count = int(self.context.sum(transitions.copies.sum()))", "count = int(transitions.copies.sum())", Q),
    ("q: every end has a target", M, "known = terminated.clone()", "known = torch.ones_like(terminated)", Q),
    ("q: the advantage's sign", W, '"advantage": values["q"] - values["value"]', '"advantage": values["value"] - values["q"]', Q),
    ("q: an action without the observation", M, "return torch.cat([self.observation, self.chunk], 1)", "return torch.cat([0 * self.observation, self.chunk], 1)", Q),
    ("q: the whole chunk is executed", M, "min(len(chunk), policy.chunk_length)", "policy.chunk_length", Q),
    ("q: no update of the targets", M, "q.module.update_targets(self.settings.tau)", "pass", Q),
    ("tail: no discount inside a chunk", T, "discounts = gamma ** before[:steps].astype(np.float64)", "discounts = 1.0 ** before[:steps].astype(np.float64)", Q),
    ("tail: the outcome with every chunk", T, "reward += discounts[-1] * self.rewards.outcome if last else 0.0", "reward += discounts[-1] * self.rewards.outcome", Q),
    ("tail: the outcome is not discounted", T, "reward += discounts[-1] * self.rewards.outcome if last", "reward += self.rewards.outcome if last", Q),
    ("tail: a discount of one action", T, "gamma ** (self.actions if last else int(before[steps]))", "gamma", Q),
    ("tail: a cut-off episode terminated", T, "terminated = last and self.terminated", "terminated = last", Q),
    ("tail: terminated from the start", T, "terminated = last and self.terminated", "terminated = self.terminated", Q),
    ("tail: an action too many", T, "(before < actions).sum()", "(before <= actions).sum()", Q),
    ("policy: chunks in the robot's units", P, "            actions = self.policy.normalizer.from_robot(actions).astype(np.float32)\n        executed", "            pass\n        executed", Q),
    ("policy: actions that were not executed", P, "return torch.cat([executed.flatten(1), valid.float()], 1)", "return torch.cat([executed.flatten(1), torch.ones_like(valid).float()], 1)", Q),
    ("policy: an observation without its state", P, "return torch.cat([prefix.last.float().cpu(), policy.robot_state(observation).float()], 1)",
     "return torch.cat([prefix.last.float().cpu(), 0 * policy.robot_state(observation).float()], 1)", Q),
    ("ring: the observation after is the one before", R, "for i in (0, 1)", "for i in (0, 0)", STORED),
    ("ring: another episode's end", R, "int(executed.sum()), self.terminated[episode]", "int(executed.sum()), self.terminated[0]", STORED),
    ("ring: all actions of the file", R, "int(executed.sum()), self.terminated", "int(self.executed.sum()), self.terminated", STORED),
    ("expert: the final observation is lost", E, "                finals.get(row),\n", "                None,\n", Q),
    ("expert: no episode terminates", E, "bool(terminated[row]),", "False,", Q),
    ("expert: every episode terminates", E, "bool(terminated[row]),", "True,", Q),
    ("expert: an observation later", E, "return self.episode.observation(self.first + step)", "return self.episode.observation(min(self.first + step + 1, len(self.episode.actions)))", Q),
    ("algorithm: weights of worse steps", A, "weights = self.weights.of(advantages)", "weights = self.weights.of(-advantages)", Q),
    ("algorithm: unlearning", A, "return -weights * replay.logp", "return weights * replay.logp", Q),
    ("q_weighted: of any origin", W, "(origin == (REPLAYED if self.of == \"replayed\" else DEMONSTRATION)) & ~", "~", Q),
    ("q_weighted: unlearning", W, "return -self.coefficient.value * losses", "return self.coefficient.value * losses", Q),
    ("q_weighted: no coefficient", W, "return -self.coefficient.value * losses", "return -losses", Q),
    ("term: correlation with itself", W, "q, earned = columns[~columns[:, :2].isnan().any(1), :2].unbind(1)", "q, earned = columns[~columns[:, :2].isnan().any(1)][:, [0, 0]].unbind(1)", Q),
    ("proposals: one observation for all", P, "prepared, state = policy.prepare(observation), policy.robot_state(observation)",
     "observation = observation.select([0] * len(prompts)); prepared, state = policy.prepare(observation), policy.robot_state(observation)", G),
    ("proposals: likeliest actions", P, "ActionSampling(list(seeds), policy.temperature.value, groups=list(groups))", "ActionSampling(list(seeds), 0.0, groups=list(groups))", G),
    ("proposals: one seed for a group", "mmrl/collection/stored_steps/proposals.py", "propose(prompts, list(seeds), groups.tolist())", "propose(prompts, groups.tolist(), groups.tolist())", G),
    ("proposals: of another origin", "mmrl/collection/stored_steps/proposals.py", "(len(groups),), PROPOSED)", "(len(groups),), PROPOSED - 1)", G),
    ("proposals: all in one group", "mmrl/collection/stored_steps/proposals.py", "proposed.group = BELOW - groups", "proposed.group = BELOW - 0 * groups", G),
    ("proposals: Q of the stored chunk", M, "estimates[proposals, 0] = proposal_values", "pass", G),
    ("proposals: Q of another observation", M, "pairs = torch.cat([transitions.observation[rows], chunks], 1)", "pairs = torch.cat([transitions.observation[0 * rows], chunks], 1)", G),
    ("proposals: all share the first step", M, "steps = {prompt.id: prompt for prompt in prompts}", "steps = {prompt.id: prompts[0] for prompt in prompts}", G),
    ("gradient: of all groups together", "mmrl/terms/losses/q_policy_gradient.py", "q[proposed], rollouts.group[proposed], scale", "q[proposed], 0 * rollouts.group[proposed], scale", G),
    ("gradient: the other sign", "mmrl/terms/losses/q_policy_gradient.py", "advantages.nan_to_num(),", "-advantages.nan_to_num(),", G),
    ("gradient: no clip", "mmrl/terms/losses/q_policy_gradient.py", "clip_high=self.clip,", "clip_high=99.0,", G),
    ("gradient: no coefficient", "mmrl/terms/losses/q_policy_gradient.py", "return self.coefficient.value * values", "return values", G),
    ("lerobot: every episode terminated", "tasks/manipulation/lerobot.py", "return success is not None and bool(success[-1].any())", "return True", ("tasks/test_lerobot.py",)),
    ("lerobot: a success on the way", "tasks/manipulation/lerobot.py", "bool(success[-1].any())", "bool(success.any())", ("tasks/test_lerobot.py",)),
]
# fmt: on
