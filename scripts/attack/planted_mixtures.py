"""Faults of heads that mix: residuals around a head that is held still, and horizons. Each entry has a name, a file, a
string that occurs once in the file, its replacement, and the tests that should then fail."""

from __future__ import annotations

R, S, L = (f"mmrl/policies/vla/{name}.py" for name in ("heads/residual", "heads/mixture_settings", "loading"))
TERM = "mmrl/terms/losses/head_cost.py"
H = "mmrl/policies/vla/heads/horizons.py"
RESIDUAL, HORIZONS = ("policies/vla/test_residual.py",), ("policies/vla/test_horizons.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("residual: what is added is taken away", R, "return proposal + self.reach", "return proposal - self.reach",
     RESIDUAL),
    ("residual: what is added has no bound", R, "expert(inputs).float().tanh()", "expert(inputs).float()", RESIDUAL),
    ("residual: experts begin anywhere", R, "last_gain=0.0", "last_gain=0.01", RESIDUAL),
    ("residual: all experts count alike", R, "self.gate(code.to(self.gate.weight)).float().softmax(1)",
     "(0 * self.gate(code.to(self.gate.weight)).float()).softmax(1)", RESIDUAL),
    ("residual: the base draws", R, "temperature=0.0, training=False", "temperature=1.0, training=False", RESIDUAL),
    ("residual: the base's rollouts are not its evaluation", R, "temperature=0.0, training=False", "temperature=0.0",
     RESIDUAL),
    ("residual: the base learns", R, "base.requires_grad_(False)", "base", RESIDUAL),
    ("residual: the backbone learns", S, "backbone.requires_grad_(False)", "backbone.requires_grad_(True)", RESIDUAL),
    ("residual: a replay asks the base again", R, 'proposal = sampled.get("proposal")', "proposal = None", RESIDUAL),
    ("residual: the code's noise is forgotten in replay", R, 'code + sampled["code_noise"], prefix', "code, prefix",
     RESIDUAL),
    ("residual: the code's noise has no temperature", R, "sampling.temperature * self._sample_code_noise", "self._sample_code_noise", RESIDUAL),
    ("residual: the code's noise is another's", R, "gaussian_noise(list(seeds), CODE_STREAM,", "gaussian_noise(list(seeds), 0,", RESIDUAL),
    ("residual: the code has no bound", R, "features.to(self.encode.weight)).float().tanh()",
     "features.to(self.encode.weight)).float()", RESIDUAL),
    ("residual: information without the noise's size", R, "- math.log(self.noise)", "", RESIDUAL),
    ("residual: information of the noisy code", R, "self.information(code)",
     'self.information(code + sampled["code_noise"])', RESIDUAL),
    ("residual: information is paid out", TERM, "return self.coefficient.value * cost",
     "return -self.coefficient.value * cost", RESIDUAL),
    ("residual: a term of fixed weight", TERM, "self.coefficient.value * cost", "0.001 * cost", RESIDUAL),
    ("residual: demonstrations have no noise in the code", R, 'self._sample_code_noise(seeds)',
     '0 * self._sample_code_noise(seeds)', RESIDUAL),
    ("residual: the base is not loaded", L, 'n.replace("head.", "head.base.", 1)', "n", RESIDUAL),
    ("residual: any base will do", L, '_architecture_values("action.head.base", saved["head"], action.head.checkpoint_head)', "[]", RESIDUAL),
    ("residual: options of a base are not looked at when it goes on", L, "if head.checkpoint_head is not head:\n        values",
     "if False:\n        values", RESIDUAL),
    ("residual: a base that nobody trained", L, "if has_own_weights(base):", "if False:", RESIDUAL),
    ("residual: a missing base is seen late", L, "    _check_base_exists(Path(path), action.head)\n", "", RESIDUAL),
    ("residual: any noise will do for what was trained", S, '"noise", "reach"', '"reach"', RESIDUAL),
    ("horizons: one too far", H, "torch.arange(chunk) < horizons", "torch.arange(chunk) <= horizons", HORIZONS),
    ("horizons: those that do not reach count", H, ".masked_fill(~self.reached, -torch.inf)", "", HORIZONS),
    ("horizons: the least scored counts most", H, "scores.softmax(1)", "(-scores).softmax(1)", HORIZONS),
    ("horizons: gates add up over actions", H, "scores.softmax(1)", "scores.softmax(2)", HORIZONS),
    ("horizons: a horizon is not told which it is", H, "one_hot = torch.eye(len(self.reached), device=state.device)",
     "one_hot = torch.zeros(2 * [len(self.reached)], device=state.device)", HORIZONS),
    ("horizons: the first number is the score", H, "outputs[..., :-1], scores", "outputs[..., 1:], scores", HORIZONS),
    ("horizons: loads count the horizons that reach", H, "gates * self.reached.sum(0)", "gates", HORIZONS),
    ("horizons: a load over the whole chunk", H, "/ self.reached.sum(1)", "/ self.shape[0]", HORIZONS),
    ("horizons: loads are drawn to nothing", H, "(load - 1).square()", "load.square()", HORIZONS),
    ("horizons: the chunk may be longer", S, "if lengths[-1] != chunk:", "if lengths[-1] > chunk:", HORIZONS),
    ("horizons: they may stand still", S, "any(a >= b for", "any(a > b for", HORIZONS),
    ("horizons: the power of two that is the chunk comes twice", S, "if 2**i < chunk)", "if 2**i <= chunk)", HORIZONS),
    ("horizons: any will do for what was trained", S, '("horizons", "width", "layers")', '("width", "layers")',
     HORIZONS),
]
