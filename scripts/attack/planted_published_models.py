"""Faults of published masked diffusion models and of steps that are scored as published. Each entry has a name, a file,
a string that occurs once in the file, its replacement, and the tests that should then fail."""

from __future__ import annotations

C, S = "mmrl/policies/discrete_diffusion/checkpoint_conversion.py", "mmrl/samplers/score.py"
CONVERSION = ("policies/discrete_diffusion/test_conversion.py",)
SCORE = ("samplers/test_score.py",)
G, CLIP = "mmrl/rewards/visual/preprocessing.py", ("rewards/test_clip.py",)
E, EDITS = "mmrl/rewards/visual/edits.py", ("rewards/test_edits.py",)

D = "mmrl/policies/diffusion/families/pipeline.py"
DDIM = ("policies/diffusion/test_schedules.py", "policies/diffusion/test_pipelines.py")
P, M = "mmrl/training/preparation.py", "mmrl/policies/discrete_diffusion/"
REDRAWN = ("policies/discrete_diffusion/test_redraw.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("llada: gate and up are exchanged", C, '"ff_proj": "mlp.gate_proj"', '"ff_proj": "mlp.up_proj"', CONVERSION),
    ("llada: norms are exchanged", C, '"attn_norm": "input_layernorm"', '"attn_norm": "post_attention_layernorm"', CONVERSION),
    ("llada: rope_theta stays at its default", C, '"rope_theta": values.get("rope_theta", 10000.0)', '"rope_theta": 10000.0', CONVERSION),
    ("mmada: as many keys as queries", C, 'values.get("n_kv_heads") or', "None or", CONVERSION),
    ("mmada: the vocabulary of config.json", C, 'config["vocab_size"] = shapes["model.embed_tokens.weight"][0]', 'config.setdefault("vocab_size", values["vocab_size"])', CONVERSION),
    ("dream: it is not shifted", C, '_qwen_config("qwen2"), _same_name, shifted=True', '_qwen_config("qwen2"), _same_name, shifted=False', CONVERSION),
    ("sdar: heads are as wide as the model says", C, '"num_key_value_heads", "head_dim"', '"num_key_value_heads", "hidden_act"', CONVERSION),
    ("sdar: it is shifted", C, '_qwen_config("qwen3"), _same_name)', '_qwen_config("qwen3"), _same_name, shifted=True)', CONVERSION),
    ("conversion: no mask token", C, "tokenizer.mask_token = token", "pass", CONVERSION),
    ("unscaled steps: the factor of the density", S, "torch.full_like(step.std, HALF**0.5)", "step.std", SCORE),
    ("unscaled steps: the constant of a sum is a mean's", S, 'if reduction == "mean" else x[0].numel()', 'if True else x[0].numel()', SCORE),
    ("unscaled steps: divergences lose their factor", S, "step_kl(flat_v, old_v, step, reduction=reduction) if unscaled", "step_kl(flat_v, old_v, scored, reduction=reduction) if unscaled", SCORE),
    ("clip gradient: pixels are not those of eight bits", G, "(x.clamp(0, 1) * 255).round() / 255 - x", "x.clamp(0, 1) - x", CLIP),
    ("clip gradient: the corner is cut out", G, "(size[0] - self.crop[0]) // 2, (size[1] - self.crop[1]) // 2", "0, 0", CLIP),
    ("clip gradient: the longer side", G, "short = min(height, width)", "short = max(height, width)", CLIP),
    ("clip gradient: resizing without antialiasing", G, "antialias=True", "antialias=False", CLIP),
    ("source_similarity: inside the mask", E, "return 1 - inside.float()", "return inside.float()", EDITS),
    ("source_similarity: a mean over all pixels", E, "(values * weights).sum() / weights.sum().clamp(min=1e-9)", "(values * weights).mean()", EDITS),
    ("ddim: the last level is always the data", D, 'config.get("set_alpha_to_one", True)', "True", DDIM),
    ("ddim: no key is set_alpha_to_one=false", D, 'config.get("set_alpha_to_one", True)', 'config.get("set_alpha_to_one", False)', DDIM),
    ("redraw: every further epoch is the second", M + "policy.py", "derive_seed(record.seed, epoch)", "derive_seed(record.seed, 1)", REDRAWN),
    ("redraw: the old policy scores the first epoch's states", P, '("inputs", *OTHER_COLUMNS)}', '("inputs",)}', REDRAWN),
    ("redraw: the reference scores the first epoch's states", P, '("inputs", *OTHER_COLUMNS)}', '("inputs", *OLD_COLUMNS)}', REDRAWN),
    ("redraw: likelihoods that were brought are taken elsewhere", M + "policy.py", "record if keep_states else", "record if False else", REDRAWN),
    ("redraw: all further epochs are the second", P, "self.later_epochs[epoch - 1]", "self.later_epochs[0]", REDRAWN),
    ("redraw: false is not read", M + "policy.py", "isinstance(self.likelihood, RandomStates) and self.likelihood.redraw", "isinstance(self.likelihood, RandomStates)", REDRAWN),
    ("redraw: views are measured in other states", M + "settings.py", "if measurement.scores]", "if False]", REDRAWN),
    ("ddim: a last step that leads nowhere", D, "if self._ddim.timesteps[-1] > 0 else 1.0", "", DDIM),
]
