"""Faults of OpenVLA-OFT's L1 head, of what takes the robot's state, and of their conversion. Each entry has a name, a
file, a string that occurs once in the file, its replacement, and the tests that should then fail."""

from __future__ import annotations

HEAD, U, V = (f"mmrl/policies/vla/backbones/{name}.py" for name in ("oft", "checkpoint_conversion", "openvla"))
CODEC, NORMAL, POLICY = (f"mmrl/policies/vla/{name}.py" for name in ("heads/codec", "heads/gaussian", "policy"))
WHOLE = ("policies/vla/test_oft.py",)
F = f"{WHOLE[0]}::test_"
ACTIONS = (f"{F}the_arm_gets_the_actions_of_the_architecture",)
BOUNDS = (f"{F}actions_are_not_clipped_as_tokens_are",)
SCALED = (f"{F}states_are_scaled_by_hand",)
LEARNS = (f"{F}on_policy_ratio_is_exactly_one", f"{F}likelihoods_are_those_around_the_published_actions")
PUBLISHED = (f"{F}saved_as_published", f"{F}saved_and_loaded_alike")
FROZEN = (f"{F}what_a_frozen_connector_holds",)
REFUSED = (f"{F}what_does_not_fit_is_named_before_weights_are_read",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("oft: places are read where they stand", HEAD, ".encode_with(empty)[:, :-1]", ".encode_with(empty)[:, 1:]", ACTIONS),
    ("oft: numbers of one kind side by side", HEAD, '"n (c a) w -> n c (a w)", c=chunk',
     '"n (a c) w -> n c (a w)", c=chunk',
     ACTIONS),
    ("oft: a block without what goes in", HEAD, "return x + self.ffn(x)", "return self.ffn(x)", ACTIONS),
    ("oft: no bend behind the first layer", HEAD, "self.fc1(self.layer_norm1(x)).relu()",
     "self.fc1(self.layer_norm1(x))", ACTIONS),
    ("oft: the projector's GELU is left out", HEAD, "self.fc2(self.act(self.fc1(", "self.fc2((self.fc1(", ACTIONS),
    ("oft: the state before the patches", V, "torch.cat([patches, state.to(patches.dtype)], 1)",
     "torch.cat([state.to(patches.dtype), patches], 1)", ACTIONS),
    ("oft: the state in the robot's units", V, "quantiles.normalize(state))", "state.copy())", ACTIONS),
    ("oft: actions are clipped", CODEC, "actions.clip(-1, 1) if self.bounded else actions",
     "actions.clip(-1, 1)", BOUNDS),
    ("oft: states are not clipped", CODEC, "(scaled.clip(-1, 1) if", "(scaled if", SCALED),
    ("oft: nothing moved is nothing to divide by", CODEC, "(self.q99 - self.q01 + 1e-8) - 1",
     "(self.q99 - self.q01) - 1", SCALED),
    ("oft: what is fixed is trained", NORMAL, "requires_grad=not settings.fixed", "requires_grad=True", LEARNS),
    ("oft: noise without the temperature", NORMAL, "sampling.temperature * self.clamped_log_std()", "self.clamped_log_std()",
     (*LEARNS, *ACTIONS)),
    ("oft: a frozen connector's projector learns", V, "backbone.proprio.requires_grad_(False)", "pass", FROZEN),
    ("oft: pickles of the state are not saved", V, 'oft.write("proprio_projector", folder, projector, {})',
     "pass", PUBLISHED),
    ("oft: the base's projector in place of the adapter's", V, "oft.find_files([Path(path), folder])",
     "oft.find_files([folder, Path(path)])", PUBLISHED),
    ("oft: published names without their beginning", HEAD, "DISTRIBUTED + name: value", "name: value", PUBLISHED),
    ("oft: a head without what it is saved beside", "mmrl/policies/vla/saved.py", 'f"head.{name}": value for name, value in head_weights.items()',
     'f"head.{name}": value for name, value in {}.items()', PUBLISHED),
    ("oft: any chunk will do", HEAD, 'if int(metadata["chunk"]) != chunk:', "if False:", REFUSED),
    ("oft: pickles are overlooked", HEAD, "if FILES[part] not in names:", "if False:", REFUSED),
    ("oft: whatever a pickle says is done", U, "weights_only=True", "weights_only=False", WHOLE),
    ("oft: names keep their beginning", U, "name.removeprefix(oft.DISTRIBUTED)", "name", WHOLE),
    ("oft: LIBERO's chunk is another", U, '("LIBERO", 8)', '("LIBERO", 5)', WHOLE),
]
