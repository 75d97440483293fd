"""Faults of trust regions over whole chains. Each entry has a name, a file, a string that occurs once in the file, its
replacement, and the tests that should then fail."""

from __future__ import annotations

J, K, V = "mmrl/algorithms/surrogates/trajectories.py", "mmrl/kernels/reference.py", "mmrl/policies/vla/"
CHAINS = ("joints/test_trajectories.py",)
ROBOT = ("joints/test_trajectories.py::test_two_looks_of_a_robot_by_hand",)
IMAGE = ("joints/test_trajectories.py::test_an_image_by_hand",)
GAUSSIAN = ("joints/test_trajectories.py::test_a_gaussian_chunk_is_compared_as_a_whole",)
REFUSED = ("joints/test_trajectories.py::test_decisions_without_an_exact_divergence_are_refused",)
NOTHING = ("joints/test_trajectories.py::test_what_bounds_nothing_is_refused",)
SUM, COST, BEYOND = (
    "sum_per_unit(step_kl.detach(), POLICY_STEPS.get(replay))",
    "self.price.value * step_kl",
    "chain_kl > self.bound",
)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("chains: summed over the rollout", J, SUM, "sum_per_unit(step_kl.detach(), None)", CHAINS),
    ("chains: a mean", J, SUM, f"{SUM} / sum_per_unit(step_kl.detach() * 0 + 1, POLICY_STEPS.get(replay))", CHAINS),
    ("chains: single steps are bounded", J, BEYOND, "step_kl > self.bound", CHAINS),
    ("chains: the wrong side of the bound", J, BEYOND, "chain_kl < self.bound", CHAINS),
    ("chains: sign of the price", J, COST, f"-{COST}", CHAINS),
    ("chains: the price is what it is at its least", J, COST, "self.price.extremes[0] * step_kl", CHAINS),
    ("chains: the price has no gradient", J, COST, f"{COST}.detach()", CHAINS),
    ("chains: every step costs the whole", J, COST, "self.price.value * chain_kl", CHAINS),
    ("chains: what is left out costs nothing", J, COST, f"{COST}.where(~dropped, 0)", CHAINS),
    ("chains: what does not count is summed too", J, ".where(micro.mask.to(log_ratio.device), 0)", "", CHAINS),
    ("chains: old and new are exchanged", J, "ratio = log_ratio.exp()", "ratio = (-log_ratio).exp()", CHAINS),
    ("chains: sign of the advantage", J, "(-ratio * advantages)", "(ratio * advantages)", CHAINS),
    ("chains: divergences are weighed", J, "reduction((policy_loss if replay.weight is None else policy_loss * replay.weight) + penalty)",
     "reduction((policy_loss + penalty) if replay.weight is None else (policy_loss + penalty) * replay.weight)", CHAINS),
    ("chains: gains are not weighed", J, "policy_loss if replay.weight is None else policy_loss * replay.weight", "policy_loss", CHAINS),
    ("chains: any decisions will do", J, 'offers=frozenset({"divergence"})', "", REFUSED),
    ("chains: a price that may grow is none", J, "self.price.extremes[1] == 0", "self.price.extremes[0] == 0", NOTHING),
    ("chains: no half", K, "kl = ref_difference.square().sum(1) * factor / (2 * variance)",
     "kl = ref_difference.square().sum(1) * factor / variance", (*ROBOT, *IMAGE)),
    ("chains: half of what it is from a Gaussian", "mmrl/policies/vla/heads/gaussian.py", "squared_distance - 1)", "squared_distance / 2 - 1)", GAUSSIAN),
    ("chains: old and new Gaussians are exchanged", "mmrl/policies/vla/heads/gaussian.py",
     "gaussian_divergence(prediction.view(current.shape), current)", "gaussian_divergence(current, prediction.view(current.shape))", GAUSSIAN),
    ("chains: steps of the first window", "mmrl/policies/vla/heads/flow.py", "self.sampler.stochastic_coefficients(points),",
     "self.sampler.stochastic_coefficients(torch.arange(points.shape[1]).expand(points.shape)),", ROBOT),
    ("looks: of other steps", V + "policy.py", ".repeat_interleave(decisions).expand", ".repeat(decisions).expand",
     ROBOT),
    ("looks: two are one", V + "policy.py", "torch.arange(shape[1], device=self.device).repeat_interleave",
     "(torch.arange(shape[1], device=self.device) // 2).repeat_interleave", ROBOT),
    ("looks: a robot does not say which", V + "policy.py", "POLICY_STEPS.name: step_index, ", "", ROBOT),
    ("units: rollouts share theirs", "mmrl/core/ratios.py", "index = (rows * len(unique) + ids)",
     "index = (rows * 0 + ids)", CHAINS),
]
