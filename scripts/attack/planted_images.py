"""Faults of image generation: text before codes, sets of images, values of latents. Each entry has a name, a file, a
string that occurs once in the file, its replacement, and the tests that should then fail."""

from __future__ import annotations

C = "mmrl/policies/autoregressive_image/"
REASONING, JANUS = (
    ("policies/autoregressive_image/test_reasoning.py",),
    ("policies/autoregressive_image/test_janus.py",),
)
CANDIDATES, VALUES = ("joints/test_candidates.py",), ("joints/test_latent_values.py",)
PARTS = ("joints/test_parts.py",)
TWINS = ("joints/test_twins.py",)
REWRITER = ("tasks/test_prompt_rewriting.py",)
INVERSE = ("joints/test_inverse.py",)
SETS = ("rewards/test_sets.py",)
CLIPS = ("tasks/test_video_generation.py",)
CHARTS, ROWS = ("tasks/test_charts.py",), ("tasks/test_named_images.py",)
D, Q = "tasks/visual_qa/data/charts.py", "tasks/visual_qa/data/named_images.py"
SENTENCES = ("policies/diffusion/test_sentences.py",)
VIEWING = ("rewards/test_viewing.py",)
NAMED, OF_NAMED = "tasks/image_generation/data/named_images.py", ("tasks/test_image_named.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("codes: words are scored one place late", "mmrl/policies/autoregressive_image/prompts.py", "torch.arange(self.reasoning_length) - 1)",
     "torch.arange(self.reasoning_length))", REASONING),
    ("codes: padding of texts counts", "mmrl/policies/autoregressive_image/policy.py", "(decision < lengths[:, None])",
     "(decision < lengths[:, None] + 1)", REASONING),
    ("codes: text may hold any token", "mmrl/policies/autoregressive_image/scorer.py", ".masked_fill(~self.allowed, -torch.inf)",
     ".masked_fill(~self.allowed, -1.0)", REASONING),
    ("codes: an image is drawn without its text", "mmrl/policies/autoregressive_image/sampling.py",
     "self.prompts.with_unconditional(self.prompts.prefixes(prompt_ids, texts), guidance)",
     "self.prompts.with_unconditional(self.prompts.prefixes(prompt_ids, [NO_TEXT] * len(texts)), guidance)", REASONING),
    ("codes: texts of neighbours change the noise", "mmrl/policies/autoregressive_image/sampling.py",
     "torch.Generator(device).manual_seed(derive_seed(int(seed), TEXT_SEED) % 2**63) for seed in seeds",
     "torch.Generator(device).manual_seed(i) for i, seed in enumerate(seeds)", REASONING),
    ("codes: guidance the other way", "mmrl/policies/autoregressive_image/scorer.py", "unconditional + guidance * (conditional - unconditional)",
     "conditional + guidance * (unconditional - conditional)", REASONING),
    ("codes: activations are never recomputed", "mmrl/policies/vlm/scorer.py", "            layer.training = on",
     "            layer.training = False", REASONING),
    ("janus: the unconditional half has no beginning", "mmrl/policies/autoregressive_image/writers.py",
     "(conditional == tokenizer.bos_token_id) | (conditional == self.between[0])", "conditional == tokenizer.bos_token_id", JANUS),
    ("janus: the decoder is trained", "mmrl/policies/autoregressive_image/writers.py", '{"vision_model", "aligner", "vqmodel"}',
     '{"vision_model", "aligner"}', JANUS),
    ("janus: images of -1 to 1", "mmrl/policies/autoregressive_image/writers.py", "(torch.cat(parts) + 1) / 2", "torch.cat(parts)", JANUS),
    ("by_part: one surrogate for both", "mmrl/algorithms/surrogates/by_part.py", '("image", IMAGE, self.image)',
     '("image", IMAGE, self.text)', PARTS),
    ("of_part: the other part", "mmrl/terms/losses/of_part.py", 'TEXT if self.part == "text" else IMAGE',
     'IMAGE if self.part == "text" else TEXT', PARTS),
    ("of_part: statistics of both parts", "mmrl/terms/losses/of_part.py", "value.where(inside, torch.nan)",
     "value.where(inside, 0.0)", PARTS),
    ("part_credit: rewards without their weights", "mmrl/terms/shapers/segments.py", "float(batch.reward_weights[batch.reward_names.index(name)])",
     "1.0", PARTS),
    # --- sets ---
    ("sets: FID without its covariances", "mmrl/core/distances.py", "+ covariance.trace() + reference_covariance.trace() - 2 * cross", "",
     SETS),
    ("sets: FID without the shared root", "mmrl/core/distances.py", " - 2 * cross", "", SETS),
    ("sets: KID counts an image with itself", "mmrl/core/distances.py", "(gram.sum() - gram.diagonal().sum())",
     "(gram.sum())", SETS),
    ("sets: what is nearer earns less", "mmrl/core/distances.py", "full_distance - torch.stack(replaced).mean()",
     "torch.stack(replaced).mean() - full_distance", SETS),
    ("sets: a subset takes its own place", "mmrl/core/distances.py", "features[member != j], subset])",
     "features[member != i], subset])", SETS),
    ("sets: subsets are prompts", "mmrl/rewards/visual/sets.py", "indices.append(num_seen.get(sample.prompt.id, 0))",
     "indices.append(len(num_seen))", SETS),
    ("sets: every group is a batch", "mmrl/rewards/compose.py", 'if reward.scope == "batch":',
     'if reward.scope == "bath":', SETS),
    # --- steps ---
    ("candidates: the worst is preferred", "mmrl/algorithms/preference/candidates.py", "signs[rows[rewards.argmax()], t] = 1.0",
     "signs[rows[rewards.argmin()], t] = 1.0", CANDIDATES),
    ("candidates: a mean over groups", "mmrl/algorithms/preference/candidates.py", "torch.tensor(len(step_pairs(micro)[0]))",
     "torch.tensor(len(micro.group.unique()))", CANDIDATES),
    ("candidates: worth what their common state is", "mmrl/measurements/chains.py",
     "_completion_rewards(rollouts, context, ends=True)", "_completion_rewards(rollouts, context, ends=False)", CANDIDATES),
    ("candidates: completed from the step before", "mmrl/policies/diffusion/decisions/chain.py", "[point + ends for",
     "[point for", CANDIDATES),
    ("candidates: everybody goes on alone", "mmrl/policies/diffusion/candidates.py",
     "state = x.repeat_interleave(size, 0)", "state = x.repeat_interleave(size, 0) if k == 0 else next_states[-1]",
     CANDIDATES),
    ("values: the mean whatever eta", "mmrl/core/values.py", "if eta == 0:", "if eta >= 0:", VALUES),
    ("values: segments lose what they add", "mmrl/terms/shapers/denoising_steps.py", "clamp(max=num_decisions)] - value[:, first]",
     "clamp(max=num_decisions)] * -1 + value[:, first]", VALUES),
    ("values: segments of one step", "mmrl/terms/shapers/denoising_steps.py", "torch.arange(num_decisions) // every * every",
     "torch.arange(num_decisions)", VALUES),
    ("values: rewards are seen before they are judged", "mmrl/terms/shapers/denoising_steps.py",
     "        value = network.predict(",
     "        self._learn(network, x, batch.combined_rewards(), batch)\n        value = network.predict(", VALUES),
    ("values: nothing is remembered", "mmrl/protocols/auxiliary.py", "            if name in self._unclaimed:\n",
     "            if False:\n", VALUES),
    ("values: no warm-up", "mmrl/terms/shapers/denoising_steps.py", 'memory["calls"] <= self.warm_up', 'memory["calls"] <= 0',
     VALUES),
    # --- twins ---
    ("twins: all of a group answer both", "mmrl/collection/rounds.py", "group_size = size // 2", "group_size = size",
     TWINS),
    ("twins: the prompt is its own twin", "mmrl/collection/rounds.py", "for member in (prompt, twin_of(prompt))]",
     "for member in (prompt, prompt)]", TWINS),
    ("twins: the margin is turned round", "mmrl/rewards/twins.py", "else score - twin for", "else twin - score for", TWINS),
    ("twins: digits ask for the same digit", "tasks/image_generation/data/digits.py",
     "            twin = (digit + int(rng.integers(1, 10))) % 10\n            twin_text",
     "            twin = digit\n            twin_text", TWINS),
    # --- prompts written anew ---
    ("rewriter: the prompt itself is drawn", "tasks/image_generation/rewriting.py", "[text for _, text in new for",
     "[samples[0].prompt.metadata['original'].text for _, text in new for", REWRITER),
    ("rewriter: images answer what was written", "tasks/image_generation/rewriting.py",
     'prompt=sample.prompt.metadata["original"], image', "prompt=replace(sample.prompt, answer=1), image", REWRITER),
    ("rewriter: every text has noises of its own", "tasks/image_generation/rewriting.py",
     'zlib.crc32(f"{prompt_id} {k}".encode()) for prompt_id, _ in new', 'zlib.crc32(f"{t} {k}".encode()) for _, t in new',
     REWRITER),
    ("rewriter: reasoning is drawn too", "tasks/image_generation/rewriting.py", 'inside[-1].strip() if inside else ""',
     "response", REWRITER),
    # --- the inverse task ---
    ("inverse: what can not be told earns more", "mmrl/algorithms/reward_transforms/inverse.py", "rewards + self.weight.value * likelihood",
     "rewards - self.weight.value * likelihood", INVERSE),
    ("inverse: words are read one place late", "mmrl/policies/autoregressive_image/policy.py", "hidden[i, -len(text) - 1 : -1]",
     "hidden[i, -len(text) :]", INVERSE),
    ("inverse: a sum over words", "mmrl/policies/autoregressive_image/policy.py", "text.to(self.device)[:, None]).mean())",
     "text.to(self.device)[:, None]).sum())", INVERSE),
    ("inverse: rows in the order of micro-batches", "mmrl/measurements/responses.py", "Column(logp[torch.cat(micro_batches).argsort()])",
     "Column(logp)", INVERSE),
    ("inverse: pixels of 0 to 1", "mmrl/policies/autoregressive_image/writers.py", ".clamp(0, 1) * 2 - 1,", ".clamp(0, 1),", INVERSE),
    # --- moving shapes ---
    ("clips: quick ones are slow to the tracker", "tasks/video_generation/tracking.py", "MIN_SPEED, FAST_SPEED = 0.25, 0.65",
     "MIN_SPEED, FAST_SPEED = 0.25, 0.75", CLIPS),
    ("clips: slow ones are quick to the tracker", "tasks/video_generation/tracking.py", "MIN_SPEED, FAST_SPEED = 0.25, 0.65",
     "MIN_SPEED, FAST_SPEED = 0.25, 0.45", CLIPS),
    ("clips: objects start where they leave the image", "tasks/data/moving_shapes.py", "return range(distance, positions)",
     "return range(positions)", CLIPS),
    ("clips: the last place of a side is never used", "tasks/data/moving_shapes.py", "self.grid - OBJECT + 1",
     "self.grid - OBJECT", CLIPS),
    ("clips: what is down goes up", "tasks/data/moving_shapes.py", "top + down * moved", "top - down * moved", CLIPS),
    # --- charts ---
    ("charts: values are not rounded", D, "round(float(value), column.decimals)", "float(value)", CHARTS),
    ("charts: bars do not start from 0", D, "axes.set_ylim(0, ", "axes.set_ylim(0.5 * min(series.values), ", CHARTS),
    ("charts: labels of the first rows", D, "self.labels[span]", "self.labels[: length]", CHARTS),
    ("charts: a limit has its own value above it", D, "str(len(ordered) - index - 1)", "str(len(ordered) - index)",
     CHARTS),
    ("charts: differences with a sign", D, "larger, smaller = smaller, larger", "larger, smaller = larger, smaller", CHARTS),
    ("charts: of several largest the first", D, "if series.values.count(top) > 1:", "if False:", CHARTS),
    ("charts: values are always written", D, "        if show_values:", "        if True:", CHARTS),
    ("charts: the user's own style", D, 'matplotlib.style.context("default")', 'matplotlib.style.context({})', CHARTS),
    # --- rows of one thing, and the tiny model that reads them ---
    ("named images: rows of one thing show several", Q, "indices[:1].repeat(cells)", "indices[:cells]", ROWS),
    ("named images: a row of one thing asks for one place", Q, "_at(POSITIONS[len(row)][int(rng.integers(len(row)))])",
     "_at(POSITIONS[len(row)][0])", ROWS),
    ("named images: the tiny model looks across the row", "mmrl/policies/vlm/tiny_qwen.py",
     "if sizes.window is None else []", "if sizes.window is None else [0]", ROWS),
    # --- named images ---
    ("sentences: only the first token is read", "mmrl/policies/diffusion/sentences.py", "states.sum(1)", "states[:, 0]",
     SENTENCES),
    ("sentences: the data for a velocity", "mmrl/policies/diffusion/sentences.py",
     "velocity(self.body.run_blocks(hidden_states, condition), hidden_states, sigma)",
     "self.body.run_blocks(hidden_states, condition)", SENTENCES),
    ("sentences: of no unit scale", "mmrl/policies/diffusion/sentences.py", " * states.shape[2] ** 0.5", "", SENTENCES),
    ("aura: times of a thousand", "mmrl/policies/diffusion/families/images.py",
     'return {"timestep": time / 1000, **texts}', 'return {"timestep": time, **texts}',
     ("policies/diffusion/test_pipelines.py",)),
    ("named: a careless image may be right", NAMED, "rng.integers(1, len(NAMES))", "rng.integers(len(NAMES))",
     OF_NAMED),
    ("named: paper shines through", NAMED, "return placed[:3] + background * (1 - placed[3:])",
     "return placed[:3] + background", OF_NAMED),
    ("named: the reward learned what is drawn", NAMED, '{"reward": "fluent", "second": "noto"}',
     '{"reward": "noto", "second": "noto"}', OF_NAMED),
    ("named: nothing is mirrored", NAMED, "thing = thing.flip(-1)", "pass", OF_NAMED),
    # --- quality and safety ---
    ("brisque: what is worse earns more", "mmrl/rewards/visual/viewing.py", "1 - float(model", "float(model", VIEWING),
    ("brisque: a flat image is judged", "mmrl/rewards/visual/viewing.py", "if (pixels == pixels[0, 0]).all():", "if False:",
     VIEWING),
    ("safe_for_work: what is not earns more", "mmrl/rewards/visual/viewing.py", "1 - float(classifier", "float(classifier",
     VIEWING),
]
