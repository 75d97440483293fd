"""Faults of policies that are made of several networks: a writer and a generator, a model and its few-step sampler."""

from __future__ import annotations

R, F = "mmrl/policies/rewritten/", "mmrl/policies/few_step/"
REWRITTEN, FEW = ("policies/rewritten/test_rewritten.py",), ("policies/few_step/test_few_step.py",)

E = "mmrl/policies/diffusion/embeddings.py"
EMBEDDED = ("policies/diffusion/test_embeddings.py",)
REWRITER = ("tasks/test_prompt_rewriting.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("rewritten: the prompt is drawn, not the text", R + "policy.py",
     "drawn = self.generator.rollout(self._told(each, texts), 1",
     "drawn = self.generator.rollout(self._told(each, [p.text for p in each]), 1", REWRITTEN),
    ("rewritten: words of originals count", R + "policy.py",
     "& ~kept[:, None]", "& ~(kept & False)[:, None]", REWRITTEN),
    ("rewritten: originals are the last of a group", R + "policy.py", "kept = place < self.settings.originals",
     "kept = place >= group_size - self.settings.originals", REWRITTEN),
    ("rewritten: rewards see the text for the prompt", R + "policy.py",
     "spoken(picture, prompt, said)\n            for picture, (prompt",
     "spoken(picture, picture.prompt, said)\n            for picture, (prompt", REWRITTEN),
    ("rewritten: steps come first", R + "policy.py", "logp=torch.cat([text.logp, picture.logp], 1)",
     "logp=torch.cat([picture.logp, text.logp], 1)", REWRITTEN),
    ("rewritten: parts are exchanged", R + "policy.py", "parts[: self.writer.max_decisions] = TEXT",
     "parts[self.writer.max_decisions :] = TEXT", REWRITTEN),
    ("rewritten: the writer is asked without its template", R + "policy.py",
     'self.settings.template.replace("{}", prompt.text)', "prompt.text", REWRITTEN),
    ("rewritten: evaluation draws the prompt", R + "policy.py",
     "self.generator.respond(self._told(prompts, texts), seeds)",
     "self.generator.respond(self._told(prompts, [p.text for p in prompts]), seeds)", REWRITTEN),
    ("rewritten: both folders hold the writer", R + "policy.py", "state_of(name, state)", "state_of(WRITER, state)",
     REWRITTEN),
    ("rewritten: a saved writer is not found", R + "loading.py", "both.is_dir()", "both.is_file()", REWRITTEN),
    ("few steps: rollouts are the model's", F + "policy.py",
     "return self.student.rollout(prompts, group_size, seeds, step=step)",
     "return self.policy.rollout(prompts, group_size, seeds, step=step)", FEW),
    ("few steps: the copy is guided", F + "policy.py", '{"guidance": 1.0, "evaluation_guidance": 1.0',
     '{"evaluation_guidance": 1.0', FEW),
    ("few steps: the grid of fewer steps, not of every other point", F + "policy.py",
     "grid = Grid(fine.grid.sigmas[:: self.every], fine.grid.times[:: self.every])",
     "grid = policy.family.grid(settings.steps + 1, policy.shape)", FEW),
    ("few steps: the secant of one step", F + "policy.py", "place + self.every for place", "place + 1 for place", FEW),
    ("few steps: the secant without its denominator", F + "policy.py",
     "(reached - a_x * x) / a_v", "reached - a_x * x", FEW),
    ("few steps: the target is not guided", F + "policy.py", "said, policy.denoising.guidance)", "said, 1.0)", FEW),
    ("few steps: the copy is asked past the engine", F + "policy.py",
     "student.guided_prediction(network, x", "student.guided_prediction(student.module, x", FEW),
    ("few steps: the model distils itself", F + "policy.py", "self.errors(rollouts, Part(model, SAMPLER))",
     "self.errors(rollouts, Part(model, POLICY))", FEW),
    ("few steps: the shares are exchanged", F + "policy.py", "few = place < round(", "few = place >= round(", FEW),
    ("few steps: hybrid rollouts in the order of who drew them", F + "policy.py",
     "Rollouts.concat(parts).select(order)", "Rollouts.concat(parts)", FEW),
    ("few steps: the sampler is saved as the model", F + "policy.py",
     "state_of(POLICY, state)", "state_of(SAMPLER, state)", FEW),
    ("distillation: what earns little weighs more", "mmrl/terms/sampler_distillation.py",
     "optimality(micro.advantages", "optimality(-micro.advantages", FEW),
    ("distillation: good pictures weigh as all do", "mmrl/terms/sampler_distillation.py",
     "values * 2 * optimality", "values * optimality", FEW),
    ("distillation: without its coefficient", "mmrl/terms/sampler_distillation.py",
     "values = self.coefficient.value * error", "values = error",
     FEW),
    ("embeddings: every prompt is the same", E, "told = json.dumps([asked.text,", "told = json.dumps([", EMBEDDED),
    ("embeddings: negative prompts are missing", E, "yield asked.saying(negative), shape", "pass", EMBEDDED),
    ("embeddings: held-out prompts are left out", E, "(task.evaluation, policy.evaluation_shape))", ")", EMBEDDED),
    ("embeddings: the token limit is not compared", E, '("text_tokens", text_tokens))', ")", EMBEDDED),
    ("embeddings: encoders are loaded all the same", "mmrl/policies/diffusion/pipelines.py",
     "encoders=model.embeddings is None", "encoders=True", EMBEDDED),
    ("rewriting: the prompt is shown whatever the data say", "tasks/image_generation/rewriting.py",
     'prompt.metadata.get("reasoning", prompt.text)', "prompt.text", REWRITER),
]
