"""Faults of LeRobot's policies as LoRA and in bf16. Their tests need LeRobot (scripts/lerobot.txt); `faults.py` leaves
them out where it is not installed."""

from __future__ import annotations

L = "mmrl/policies/vla/backbones/lerobot.py"
LORA, HALF = "policies/vla/test_lerobot_lora.py::test_", "policies/vla/test_lerobot_bfloat16.py::test_"
SAVED = (LORA + "what_is_saved_acts_the_same_in_lerobot",)
ACTS = (HALF + "it_acts_as_lerobots_code_with_transformers_in_bf16_and_the_rest_in_fp32",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("lerobot: adapters where nothing is trained", L, "isinstance(m, nn.Linear) and m.weight.requires_grad]",
     "isinstance(m, nn.Linear)]", (LORA + "frozen_parts_have_no_adapters_and_are_read_once",)),
    ("lerobot: targets are not looked at", L, "if lora_config.target_modules is not None:", "if False:",
     (LORA + "frozen_parts_have_no_adapters_and_are_read_once",)),
    ("lerobot: config.json tells of no adapter", L, '{**config, "use_peft": True}', "config", SAVED),
    ("lerobot: a saved adapter trains in frozen parts", L, "backbone_class.freeze(policy, model.freeze)  # this time the adapters inside these parts", "pass",
     SAVED),
    ("lerobot: a saved adapter does not train", L, "is_trainable=True", "is_trainable=False", SAVED),
    ("lerobot: alpha is the default", L, "lora_alpha=lora.alpha,  # type: ignore[arg-type]", "",
     (LORA + "a_new_one_has_its_rank_and_scale",)),
    ("lerobot: noisy actions in bf16", L, "F.linear(x.float(), self.weight.float(), bias)",
     "F.linear(x.to(self.weight.dtype), self.weight, self.bias)", ACTS),
    ("lerobot: noise levels in bf16", L, "if isinstance(module, pi_gemma.PiGemmaRMSNorm))]", "if False)]", ACTS),
    ("lerobot: angles in bf16", L, "for parameter in policy.parameters():",
     "for parameter in [*policy.parameters(), *policy.buffers()]:", ACTS),
    ("lerobot: heads for words are trained", L, 'if "lm_head." in name and', 'if "lm_heads." in name and',
     ("policies/vla/test_lerobot_policy.py::test_heads_for_words_are_not_trained",)),
]
