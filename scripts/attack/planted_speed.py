"""Faults of passes that are saved: old policies, halves of guidance, references without adapters, keys and values that
stay. A name, a file, a text that it holds once, what takes its place, and the tests that could notice."""

from __future__ import annotations

P, D, G = "mmrl/preparation.py", "mmrl/policies/diffusion/policy.py", "mmrl/generation/"
STEPS, PICTURES, CHAINS = ("joints/test_steps.py",), ("policies/diffusion/test_policy.py",), ("samplers/test_chain.py",)
SNAPSHOTS, DECODING = ("engine/test_snapshot.py",), ("generation/test_decoding.py",)
TOKENS = ("policies/test_vlm.py",)
PARTS = ("policies/diffusion/test_steps_at_once.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("old policy: never of the first minibatch", P, "known = not now or self.algorithm.epochs > 1", "known = not now",
     STEPS),
    ("old policy: another minibatch is its own", P, "minibatches[0] = [replace(micro, **unknown) for micro in "
     "minibatches[0]]", "minibatches[-1] = [replace(micro, **unknown) for micro in minibatches[-1]]", STEPS),
    ("old policy: what was kept is asked again", P, "*([] if made is not None else every[len(now) :])",
     "*every[len(now) :]", STEPS),
    ("old policy: what was kept serves before the first update too", P, "asked = [*(now if known else []), ",
     "asked = [", STEPS),
    ("epochs: every one in the same order", "mmrl/trainer.py",
     "in torch.randperm(len(minibatches), generator=shuffle).tolist()", "in range(len(minibatches))",
     STEPS),
    ("chain: predictions of the step behind", "mmrl/samplers/chain.py", '"v": v[random]', '"v": moved[random]', CHAINS),
    ("chain: a drawn step in another's place", "mmrl/samplers/chain.py", "place = drawn.cumsum(1) - 1",
     "place = drawn.flip(1).cumsum(1).flip(1) - 1", CHAINS),
    ("pictures: half of guidance is saved after updates too", D,
     "self.keep_predictions and rollouts.old_prediction is None and torch", "self.keep_predictions and torch",
     PICTURES),
    ("pictures: half of guidance is saved in another policy's pass", D,
     "rollouts.old_prediction is None and torch.is_grad_enabled()", "rollouts.old_prediction is None", PICTURES),
    ("pictures: a view keeps what was said of its prompt", D, "replace(record, asked=Asked.of(p), prediction=None)",
     "replace(record, asked=Asked.of(p))", PICTURES),
    ("guidance: the conditional half moves it once", "mmrl/samplers/guidance.py",
     "known + rows * (conditional - conditional.detach())", "known + (conditional - conditional.detach())", PICTURES),
    ("reference: adapters stay on", "mmrl/engine/snapshot.py", "self._switch(True)", "self._switch(False)", SNAPSHOTS),
    ("reference: adapters stay off", "mmrl/engine/snapshot.py", "            self._switch(False)",
     "            self._switch(True)", SNAPSHOTS),
    ("reference: adapters that changed the model are left out", "mmrl/engine/snapshot.py",
     " or any(bool(weight.any()) for weight in second)", "", SNAPSHOTS),
    ("reference: other trained weights stay what they are", "mmrl/engine/snapshot.py", "if others or not plain",
     "if not plain", SNAPSHOTS),
    ("reference: a moving one without adapters", "mmrl/engine/snapshot.py", "if not stays or zero_stage == 3",
     "if zero_stage == 3", SNAPSHOTS),
    ("decoding: tokens lie one place late", G + "decoding.py", "room[:, :, before:length] = new",
     "room[:, :, -new.shape[2] :] = new", DECODING),
    ("decoding: memory is never doubled", G + "decoding.py", "max(length, min(2 * length, self.longest))", "length",
     DECODING),
    ("decoding: heads share what is another's", G + "decoding.py",
     "query.reshape(rows, shared, heads // shared, size)",
     "query.reshape(rows, heads // shared, shared, size).transpose(1, 2)", DECODING),
    ("decoding: attention without its scale", G + "decoding.py", 'scale=options.get("scaling")', "scale=None",
     DECODING),
    ("decoding: the model keeps the attention", G + "decoding.py", "        config._attn_implementation = usual",
     "        pass", DECODING),
    ("decoding: who is left draws with others' seeds", G + "transformers.py",
     "[generators[response] for response in going.tolist()]", "generators[: len(going)]", TOKENS),
    ("decoding: nobody leaves", G + "transformers.py", "if ended.sum() * LEAVING >= len(ended):", "if False:", TOKENS),
    ("decoding: tokens of who is left go to others", G + "transformers.py", "tokens[going, step] = token",
     "tokens[: len(going), step] = token", TOKENS),
    ("parts of a replay: those of rollouts alone are the same", D, "size = self.steps_at_once or rows",
     "size = (self.steps_at_once if torch.is_grad_enabled() else None) or rows", PARTS),
    ("parts of a replay: everything is kept", "mmrl/policies/parts.py",
     "len(parts) == 1 or not torch.is_grad_enabled()", "True", PARTS),
    ("parts of a replay: levels of the first part", D, "grid.sigmas[flat[part]], grid.times[flat[part]],",
     "grid.sigmas[flat[: len(rows[part])]], grid.times[flat[: len(rows[part])]],", PARTS),
    ("parts of a replay: prompts of the first part", D, "sigma, time, said[part], guidance, own)",
     "sigma, time, said[: len(rows[part])], guidance, own)", PARTS),
    ("parts of a replay: what the sampler said of the first part", D, "None if known is None else known[part]",
     "None if known is None else known[: len(rows[part])]", PARTS),
    ("parts of a replay: the key is not heard", "mmrl/policies/diffusion/settings.py",
     "steps_at_once=config.engine.steps_at_once", "steps_at_once=None", PARTS),
    ("parts of a replay: finished pictures go at once", D, "self._joined(predict, len(rows)).float().view_as(x)",
     "predict(slice(None)).float().view_as(x)", PARTS),
]
