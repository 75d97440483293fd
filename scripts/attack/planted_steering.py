"""Faults of robots that learn beside their episodes: a frozen flow that is steered by its noise, demonstrations, and an
expert's labels. Each entry has a name, a file, a string that occurs once in the file, its replacement, and the tests
that should then fail."""

from __future__ import annotations

H, S, F, V = (
    f"mmrl/policies/vla/{name}.py" for name in ("heads/steered", "heads/steered_settings", "heads/flow", "policy")
)
L = "mmrl/collection/expert_labels.py"
W, J = "mmrl/terms/step_rewards.py", "tasks/manipulation/judged.py"
WRITTEN = ("joints/test_step_rewards.py",)
STEERED, BESIDE = ("policies/vla/test_steered.py",), ("whole_runs/test_robot_demonstrations.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("steered: the flow learns", H, "base.requires_grad_(False)", "base", STEERED),
    ("steered: the backbone learns", S, "backbone.requires_grad_(False)", "backbone.requires_grad_(True)", STEERED),
    ("steered: noise of actions that were cut off does not count", H, 'repeat(valid.any(1), "n -> n c", c=self.noise.shape[0])',
     "valid", STEERED),
    ("steered: the spread does not move the displacement", H, " + (self.noise.clamped_log_std().exp() - 1).square()", "", STEERED),
    ("steered: the first noise stands for all behind", H, "noise[:, -1:].expand", "noise[:, :1].expand", STEERED),
    ("steered: the flow runs backwards", F, "x = x + (next_sigma - sigma) *", "x = x - (next_sigma - sigma) *", STEERED),
    ("steered: any number of noises will do for what was trained", S, '"layers", "noises", "bound")', '"layers", "bound")', STEERED),
    ("steered: any bound will do for what was trained", S, '"noises", "bound")', '"noises")', STEERED),
    ("steered: the bound is not in the density", "mmrl/policies/vla/heads/gaussian.py", " + math.log(self.bound)", "", STEERED),
    ("steered: noise within 1", "mmrl/policies/vla/heads/gaussian.py", 'self.bound * sampled["actions"].tanh()', 'sampled["actions"].tanh()', STEERED),
    ("steered: a bound of bounded noise is ignored", H, "self.noise.bound = settings.bound", "pass", STEERED),
    ("step rewards: at the first step of a span", W, '"amax")', '"amin", include_self=False)', WRITTEN),
    ("step rewards: no weight", W, "self.weight * rewards.where", "rewards.where", WRITTEN),
    ("step rewards: of decisions", W, "decision.long() // per_step", "decision.long()", WRITTEN),
    ("step rewards: not added", "mmrl/algorithms/ppo.py", "rewards + self.step_rewards.of(batch, steps)", "rewards", WRITTEN),
    ("step rewards: what falls is paid", J, "(t, t + 1, after - before)", "(t, t + 1, before - after)", WRITTEN),
    ("step rewards: spans count decisions", "mmrl/measurements/spans.py", "// per_step", "// 1", WRITTEN),
    ("labels: the expert says one action", V, "rows), length=self.action.chunk)", "rows))", BESIDE),
    ("labels: the newest leave first", L, "][-self.keep :]", "][: self.keep]", BESIDE),
    ("labels: none is kept at a checkpoint", L, '{"kept": [pack(prompt) for prompt in self._kept]}', '{"kept": []}', BESIDE),
    ("demonstrations: a critic learns from them", V, "zeros = torch.zeros(len(samples), 1)", "zeros = torch.ones(len(samples), 1)",
     BESIDE),
]
