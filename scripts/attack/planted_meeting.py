"""Faults where two parts meet, written down before the tests were read. Each entry has a name, a file, a string that
occurs once in the file, its replacement, and the tests that should then fail."""

from __future__ import annotations

COLLECT = (
    "joints/test_meeting_points.py",
    "joints/test_collection.py",
    "joints/test_guidance.py",
    "joints/test_replays.py",
)
TURNS = ("joints/test_ppo.py", "policies/test_turns_reused.py", "joints/test_turn_recipes.py")
VIEWS = ("policies/test_turns_reused.py", "prompts/test_views.py")
C, E = "mmrl/collection/collector.py", "mmrl/collection/extra_sources.py"
D, T = "mmrl/collection/dynamic_sampling.py", "mmrl/policies/vlm/turns.py"
P, R = "mmrl/algorithms/ppo.py", "mmrl/rollouts.py"

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    # --- samplers of prompts, sources and dynamic sampling ---
    ("meet: a sampler hears rewards as accuracies", C,
     "Outcome(prompts[0], totals, accuracies)",
     "Outcome(prompts[0], totals, totals)", COLLECT),
    ("meet: rescued groups are judged without their rescue", C, "informative = self._informative(batch, filters)",
     "informative = self._informative(fresh, filters); informative = torch.isin(batch.group, fresh.group[informative])", COLLECT),
    ("meet: staleness counts rescuers", C, "if rollouts.origin is None else rollouts.origin == FRESH",
     "if rollouts.origin is None else rollouts.origin >= FRESH", COLLECT),
    ("meet: sources see steps without rewards", C, "if batch.rollouts.rewards is not None:\n            self.extras.observe(batch)",
     "self.extras.observe(batch)", COLLECT),
    ("meet: flat groups go although a shaper learns from them", C, "if any(shaper.learns_from_equal_rewards for shaper in algorithm.shapers):",
     "if all(shaper.learns_from_equal_rewards for shaper in algorithm.shapers):", COLLECT),
    ("meet: a resume forgets what sources keep of a rank", C, 'self.extras.load_rank(rank_state["extras"])', "pass",
     COLLECT),
    ("meet: unscored groups have failed", E, "if len(known) and not bool((known >= accuracy).any()):",
     "if not bool((known >= accuracy).any()):", COLLECT),
    ("meet: blanks are fresh", E, "copies.origin = torch.full((count,), REPLAYED)", "copies.origin = torch.full((count,), 0)", COLLECT),
    ("meet: sources that join groups come twice with dynamic sampling", E,
     "return self._add(rollouts, [source for source in self.sources if not source.in_group])",
     "return self._add(rollouts, self.sources)", COLLECT),
    ("meet: the round, not the draw, orders groups first", D, "return (not self.informative, self.sampling_round, self.position)",
     "return (self.informative, self.sampling_round, self.position)", COLLECT),
    # --- replay ---
    ("meet: replayed rollouts are stored again", "mmrl/collection/replay_buffer.py",
     "new = (rollouts.origin == FRESH) | (rollouts.origin == EXTRA)", "new = rollouts.origin >= FRESH", COLLECT),
    ("meet: the unscored are stored", "mmrl/collection/replay_buffer.py", "& new & batch.rollout_mask & scored",
     "& new & batch.rollout_mask", COLLECT),
    ("meet: imitated rollouts have rewards", "mmrl/collection/replay_buffer.py",
     "imitated.rewards = torch.full_like(imitated.rewards, torch.nan)", "imitated.rewards = imitated.rewards", COLLECT),
    # --- turns and critic ---
    ("meet: the value of a turn is that of its last token", R, 'scatter_reduce(1, index, column, "amin")',
     'scatter_reduce(1, index, column.where(self.mask, -1), "amax", include_self=False)', TURNS),
    ("meet: rewards of turns weigh nothing", P, "steps.rewards = rewards[:, : steps.mask.shape[1]].where(steps.mask, 0.0)",
     "steps.rewards = 0 * rewards[:, : steps.mask.shape[1]].where(steps.mask, 0.0)", TURNS),
    ("meet: a turn is paid at each of its tokens", P, "where(steps.mask & (turn != next_turn), 0.0)", "where(steps.mask, 0.0)", TURNS),
    ("meet: turns are tokens", P, 'if time_step == "turn":', "if False:", TURNS),
    ("meet: what divergence costs is paid by the first turn", P, "scatter_add(1, steps.index, values)",
     "scatter_add(1, 0 * steps.index, values)", TURNS),
    ("meet: the critic learns its values of other columns", P, "_steps(micro).at_step_starts(replay.value)",
     "replay.value[:, : _steps(micro).mask.shape[1]]", TURNS),
    ("meet: unscored conversations are worth 0 to the critic", P, "steps.mask = steps.mask & ~total.isnan()[:, None]",
     "total = total.nan_to_num(0.0)", TURNS),
    # --- turns, stored and continued ---
    ("meet: recalled at the present temperature", T, 'temperature=state["temperature"])', "temperature=1.0)", TURNS),
    ("meet: recalled with another end", T, 'draft.dialogue.finish(state["end"])', 'draft.dialogue.finish("environment")', TURNS),
    ("meet: errors of tools count twice", T, "        if counts:\n", "        if counts or not counts:\n", TURNS),
    ("meet: a conversation goes on after its observations, not its tokens", T,
     "positions = row.decision_mask.nonzero().flatten()[:length]", "positions = torch.arange(len(row.decision_mask))[:length]", TURNS),
    ("meet: a conversation that goes on is begun twice", T, "prompts = [prompt.before_start or replace(prompt, messages=chat(prompt)) for",
     "prompts = [replace(prompt, messages=chat(prompt)) for", TURNS),
    ("meet: another answer of a world is taken", T, "if not torch.equal(draft.tokens.response[:length], response[:length]):",
     "if False:", TURNS),
    # --- views ---
    ("meet: a view leaves images of messages", R, "return part if isinstance(part, str) else transform(part)", "return part", VIEWS),
    ("meet: a view leaves observed images", "mmrl/policies/vlm/responses/reuse.py",
     "if row.observed_images and drafter.conversations is not None:", "if False:", VIEWS),
    ("meet: a view takes another image's place", T, "images = [image for _ in observation for image in next(changed_messages).images]",
     "images = [image for _ in observation for image in next(changed_messages).images][::-1]", VIEWS),
    ("meet: responses under a view see the first images", "mmrl/prompts/views.py",
     "return replace(changed, before_start=self.changed(prompt.before_start, step))", "return changed", VIEWS),
    # --- segments, reference, unscored ---
    ("meet: segments of conversations count observations", "mmrl/core/credit.py",
     "(mask.cumsum(1) - 1).clamp(min=0) // segment_length", "torch.arange(mask.shape[1]).expand(mask.shape) // segment_length",
     ("joints/test_segments.py",)),
    ("meet: adapters stay on for the reference", "mmrl/engine/snapshot.py", "self._switch(True)\n", "self._switch(False)\n",
     ("engine/test_snapshot.py",)),
    ("meet: prefixes of conversations are learned from", "mmrl/collection/guided_groups.py",
     "continued.mask & (continued.mask.cumsum(1) > lengths[:, None])",
     "continued.mask & (continued.mask.cumsum(1) >= lengths[:, None])", COLLECT),
    ("meet: a mean of unscored rewards is 0", "mmrl/prompts/curriculum.py", "finite = [value for value in values if math.isfinite(value)]",
     "finite = [value if math.isfinite(value) else 0.0 for value in values]", ("prompts/test_curriculum.py",)),
]
