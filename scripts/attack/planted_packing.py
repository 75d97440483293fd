"""Faults of rows without padding, of jobs on GPUs and of their estimates. Each entry has a name, a file, a string that
occurs once in the file, its replacement, and the tests that should then fail."""

from __future__ import annotations

P, F, R = "mmrl/policies/vlm/responses/packing.py", "mmrl/engine/flops.py", "mmrl/policies/vlm/responses/"
T = "mmrl/doctor/time_estimate.py"
PACKING, FLOPS, TIME = ("policies/test_packing.py",), ("engine/test_flops.py",), ("doctor/test_time_estimate.py",)
SUMS, SYNCED = ("engine/test_gradient_sums.py",), ("policies/test_synced.py",)
X, FEATURES = R + "features.py", ("policies/test_image_features.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("packing: sequences see later tokens", P, "is_causal=causal, scale=scale, enable", "is_causal=False, scale=scale, enable", PACKING),
    ("packing: windows are causal", P, "causal = options.get(\"scaling\"), is_causal is not False",
     "causal = options.get(\"scaling\"), True", PACKING),
    ("packing: the model's scale is not used", P, "scale=scale, enable_gqa", "scale=None, enable_gqa", PACKING),
    ("packing: positions go on over rows", P, '"position_ids": tokens.packed(positions).unsqueeze(-2)',
     '"position_ids": torch.arange(len(tokens.index)).expand(*positions.shape[:-2], 1, -1)', PACKING),
    ("packing: sequences begin one late", P, "F.pad(mask.sum(1).cumsum(0), (1, 0))", "F.pad(mask.sum(1).cumsum(0), (1, 0)).clamp_min(1)", PACKING),
    ("packing: features of images stay padded", P, 'packed["visual_pos_masks"] = tokens.packed(kwargs["visual_pos_masks"])[None]',
     "pass", PACKING),
    ("packing: never worth it", P, "sum(lengths) < MAX_FILL", "sum(lengths) < 0 * MAX_FILL", PACKING),
    ("packing: always worth it", P, "sum(lengths) < MAX_FILL", "sum(lengths) <= 2 * MAX_FILL", PACKING),
    ("packing: windows one by one", "mmrl/policies/vlm/loading.py", "    pack_images(core)\n", "", PACKING),
    ("packing: cannot be switched off", R + "runner.py", "if packing and self.can_pack:", "if self.can_pack:", PACKING),
    ("packing: a shared decoder packs twice", P, 'tokens is None or kwargs.get("cu_seq_lens_q") is not None', "tokens is None", PACKING),
    ("packing: routed rows too", R + "replay.py", "packs = continuations is None and routing is None and", "packs = continuations is None and",
     ("policies/test_routing.py",)),
    ("packing: adapters of sparse models too", R + "runner.py", "return self.module.can_pack and worthwhile(lengths)",
     "return worthwhile(lengths)", PACKING),
    ("work: packed rows as one sequence", F, "pairs = int(starts.diff().long().square().sum())", "pairs = int(starts[-1].long().square())", PACKING),
    ("work: shared heads by torch's formula", F, '    "aten._scaled_dot_product_flash_attention": attention_flops,\n', "", FLOPS),
    ("work: keys of packed attention are queries", F, "key_starts = starts if key_starts is None else key_starts", "key_starts = starts", FLOPS),
    ("engine: overlapping sums at every stage", "mmrl/engine/deepspeed.py", '== "nccl" and self.zero_stage >= 2', '== "nccl"', SUMS),
    ("engine: no overlapping sums", "mmrl/engine/deepspeed.py", '== "nccl" and self.zero_stage >= 2', '== "nccl" and self.zero_stage > 3', SUMS),
    ("estimate: epochs are one", T, "* config.algorithm.epochs", "", TIME),
    ("estimate: ranks do not share", T, "* config.algorithm.epochs / ranks", "* config.algorithm.epochs", TIME),
    ("estimate: recomputation is free", T, "(flops_per_rollout.total + recomputed)", "flops_per_rollout.total", TIME),
    ("estimate: at the whole peak", T, "ASSUMED_UTILIZATION = 0.4", "ASSUMED_UTILIZATION = 1.0", TIME),
    ("checksums: the trainer sums all the same", "mmrl/policies/vlm/synced.py", "sent if self.comparison is None else self.base.recorded(sent)",
     "self.base.recorded(sent)", SYNCED),
    ("checksums: engines watch all the same", "mmrl/generation/vllm/engine.py", "{WATCHES: settings.checksums}", "{WATCHES: True}", SYNCED),
    ("checksums: engines never watch", "mmrl/generation/weight_sync/receiver.py", "if not additional[WATCHES]:", "if True:", SYNCED),
    ("features: all images have those of the first", X, "[self._kept[part[PIXELS]] for part in images]", "[self._kept[images[0][PIXELS]] for part in images]", FEATURES),
    ("features: images of observations are left out", X, "for part in (row.images, row.observed_images) if PIXELS in part]", "for part in (row.images,) if PIXELS in part]", FEATURES),
    ("features: computed each time", X, "if part[PIXELS] not in self._kept}", "if True}", FEATURES),
    ("features: of one deeper layer alone", X, "[join(layer) for layer in layers]", "[join(layer) for layer in layers][:1]", FEATURES),
    ("features: a LoRA in the tower is taken for frozen", "mmrl/policies/vlm/loading.py", 'p.requires_grad or ".lora_" in name for', "p.requires_grad for", FEATURES),
    ("features: a trained connector is taken for frozen", "mmrl/policies/vlm/loading.py", 'if part_of(name) != "language"]', 'if part_of(name) == "vision"]', FEATURES),
    ("features: ranks run the tower unequally often", R + "runner.py", "not self.module.reuses_features or self.lockstep is not None:", "not self.module.reuses_features:", FEATURES),
]
# fmt: on
