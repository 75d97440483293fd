"""Faults of optimizers, gains over the reference policy, options of questions and worlds over turns. Each entry has a
name, a file, a string that occurs once in the file, its replacement, and the tests that should then fail."""

from __future__ import annotations

SGD = ("joints/test_optimizer.py",)
RESHAPE = ("engine/test_reshape.py",)
COLUMNS = ("tasks/test_sources.py",)
FINDINGS = ("rewards/test_findings.py",)
GAMES, REPORT = ("sims/test_games.py",), ("report/test_report.py",)
WIRE = ("rewards/test_http.py",)
JUDGES, J = ("rewards/test_text_judges.py",), "mmrl/rewards/judges/text.py"
MOMENTUM = ("joints/test_advantage_momentum.py",)
C, F = "tasks/visual_qa/data/columns.py", "mmrl/rewards/visual/findings.py"
E, R, M, P = (
    "mmrl/engine/settings.py",
    "mmrl/engine/reshape.py",
    "mmrl/terms/shapers/groups.py",
    "mmrl/training/preparation.py",
)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("sgd: its momentum is not told", E, 'return {"momentum": self.momentum}', "return {}", SGD),
    ("sgd: a moment is counted that it has not", E, 'if self.momentum > 0 else ()', 'if self.momentum >= 0 else ()',
     SGD),
    ("optimizer: options are not taken", "mmrl/engine/deepspeed.py", "clip_grad_norm=guard_clip, **optim.options)",
     "clip_grad_norm=guard_clip)", SGD),
    ("optimizer: the gradient is not clipped", "mmrl/engine/deepspeed.py", "            if self.clip_grad_norm > 0:\n",
     "            if self.clip_grad_norm > 9:\n", SGD),
    ("reshape: moments begin anew under ZeRO 3", R,
     "safe_set_local_optimizer_state(parameter, padded(parameter, assemble(name, key)), key)",
     "safe_set_local_optimizer_state(parameter, 0 * padded(parameter, assemble(name, key)), key)", RESHAPE),
    ("reshape: steps are counted anew", R, ".fill_(float(states[0][STEP]))", ".fill_(0.0)", RESHAPE),
    ("reshape: parameter groups are forgotten", "mmrl/engine/deepspeed.py", "for group in groups for p in group[\"params\"]}",
     "for group in [{\"params\": self._trained}] for p in group[\"params\"]}", RESHAPE),
    ("reshape: fp32 weights of stage 0 begin anew", R, "        master.copy_(assemble(name, MASTER)", "        master.add_(0 * assemble(name, MASTER)",
     RESHAPE),
    ("reshape: slices of ZeRO 3 are cut at the front", R, "pad(slice_, (0, ", "pad(slice_, (1, -1 + ", RESHAPE),
    ("advantage_momentum: the sign is turned", M, "batch.local(batch.combined_rewards()) - batch.measured(ReferenceRewards()).values",
     "batch.measured(ReferenceRewards()).values - batch.local(batch.combined_rewards())", MOMENTUM),
    ("advantage_momentum: the bounds are exchanged", M, "clamp(-self.low, self.high)", "clamp(-self.high, self.low)",
     MOMENTUM),
    ("advantage_momentum: what is not scored counts as 0 beside what is", M, "bonus = difference.clamp(",
     "bonus = (batch.local(batch.combined_rewards()).nan_to_num(0.0) - batch.column('reference_reward').nan_to_num(0.0)).clamp(",
     MOMENTUM),
    ("advantage_momentum: the present policy answers", "mmrl/measurements/answers.py",
     "        with context.weights(\"reference\"):\n", "        with context.weights(\"sampling\"):\n",
     MOMENTUM),
    ("advantage_momentum: it answers with the seeds of rollouts", "mmrl/runtime/seeds.py",
     "SeedSequence([seed, position, 0, REFERENCE])", "SeedSequence([seed, position, 0])", MOMENTUM),
    ("advantage_momentum: every rollout has the first group's", "mmrl/measurements/answers.py", "torch.arange(num_prompts))[member]", "torch.arange(num_prompts))[0 * member]",
     MOMENTUM),
    ("options: they are not appended", C, "for letter, text in options.items())", "for letter, text in ())", COLUMNS),
    ("options: a number counts from 1", C, "return letters[index]", "return letters[index - 1]", COLUMNS),
    ("options: images stay in the order of their columns", C, "[available[number] for number in (*unmarked, *marked)]",
     "[available[number] for number in sorted((*unmarked, *marked))]", COLUMNS),
    ("options: images that no text names come last", C, 'text = "<image>" * len(unmarked) + text',
     'text = text + "<image>" * len(unmarked)', COLUMNS),
    ("options: the key is not told to the files", "tasks/visual_qa/settings.py",
     '"options_field": self.options_field,', '"options_field": None,', COLUMNS),
    ("findings_named: what is invented costs nothing", F,
     "(len(present_findings) + invented)", "len(present_findings)", FINDINGS),
    ("findings_named: the answer counts as reasoning", F, "sample.response if everywhere else",
     "sample.response if True else", FINDINGS),
    ("findings_named: parts of words are found", F, "{begin}{re.escape(phrase)}{end}",
     "{re.escape(phrase)}", FINDINGS),
    ("findings_named: a prompt without a report earns 0", F, "            return None\n        text",
     "            return 0.0\n        text", FINDINGS),
    # --- worlds over turns, and what a report names ---
    ("gymnasium turns: render() is asked for though an image is seen", "sims/turns/gymnasium.py",
     "if self.image is None and not observes_images(", "if self.image is None and observes_images(", GAMES),
    ("gymnasium turns: a key that there is not is found out in the first game", "sims/turns/gymnasium.py",
     "self.image is not None and self.image not in keys", "self.image is not None and False", GAMES),
    ("gymnasium turns: an expert's game has no limit", "sims/turns/gymnasium.py",
     "while not over and len(responses) < settings.limits.max_turns:", "while not over:", GAMES),
    ("turns: a batch that was lost has nothing to score", "mmrl/policies/vlm/scorer.py",
     "if len(targets) == 0:  # the product has no rows", "if False:  # the product has no rows", ("policies/test_turns.py",)),
    ("prompts of images: a column of the user's makes them edits", "tasks/image_generation/task.py",
     "if self._edits:", 'if all("wanted" in s.prompt.metadata for s in samples):', ("tasks/test_image_edits.py",)),
    ("health: changes are not looked for next to the ends", "mmrl/report/changes.py", "in ends | between if",
     "in between - ends if", REPORT),
    ("health: factors are differences", "mmrl/report/changes.py", "    if factors:\n", "    if False:\n", REPORT),
    ("report: a run that breaks off is whole", "mmrl/report/records.py", "rows and last < steps", "rows and last < 0",
     REPORT),
    ("checkpoints: runs older than the choice of optimizers are refused", "mmrl/checkpoints/training.py",
     "BEFORE | dict(leaves(before))", "dict(leaves(before))", ("checkpoints/test_checkpoints.py",)),
    ("judges: clips are not shown", J, "for video in prompt.videos)", "for video in prompt.videos[:0])", JUDGES),
    ("judges: the last frame is missing", J, "round(index * (len(frames) - 1) / (num_frames - 1))",
     "round(index * (len(frames) - 1) / num_frames)", JUDGES),
    ("judges: clips before images", J, "(*prompt.images, *(frame for video in videos for frame in video))",
     "(*(frame for video in videos for frame in video), *prompt.images)", JUDGES),
    ("judges: the mark of a clip is read out", J, '.replace("<video>", "")', "", JUDGES),
    ("servers: clips of prompts stay behind", "mmrl/rewards/services/http.py", "if sample.prompt.videos:", "if False:", WIRE),
    ("servers: made clips stay behind", "mmrl/rewards/services/http.py", 'f"frames_{number}": sample.frames}',
     'f"frames_{number}": None}', WIRE),
    ("servers: made clips stay behind as JSON", "mmrl/rewards/services/http.py",
     'if sample.frames is not None and format == "json":', "if False:", WIRE),
    ("servers: clips lose their time", "mmrl/rewards/services/http.py", 'for text in video["frames"]), video["fps"])',
     'for text in video["frames"]))', WIRE),
]
