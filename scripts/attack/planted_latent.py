"""Faults of the head that reasons before it acts."""

from __future__ import annotations

L, LATENT = "mmrl/policies/vla/heads/latent.py", ("policies/vla/test_latent.py",)
COSTS = ("tasks/test_manipulation.py::test_what_latents_before_a_chunk_cost",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("latent: what comes after the exit counts", L, 'mask = self._latent_mask(sampled["count"]) &', "mask =", LATENT),
    ("latent: yes for no", L, "exit_logit.where(exits, -exit_logit)", "(-exit_logit).where(exits, exit_logit)", LATENT),
    ("latent: the exit before", L, "1 + torch.arange(self.exits,", "torch.arange(self.exits,", LATENT),
    ("latent: exits are scored at one", L, ".float()) / temperature,", ".float()),", LATENT),
    ("latent: exits are drawn at one", L, "(logit / (sampling.temperature or 1.0)).sigmoid()", "logit.sigmoid()", LATENT),
    ("latent: latents are scored at one", L, "(math.log(self.latent_std) + temperature.log())",
     "(math.log(self.latent_std) + 0 * temperature.log())", LATENT),
    ("latent: latents are drawn at one", L, "latents[active, k] = mean + sampling.temperature * self.latent_std",
     "latents[active, k] = mean + self.latent_std", LATENT),
    ("latent: the likeliest exit is drawn", L, "if sampling.temperature else 0.5)", "if True else 0.5)", LATENT),
    ("latent: it goes on after the exit", L, "active = active[~exits]", "active = active", LATENT),
    ("latent: each latent for itself", L, "self._latent_mean(context, latents))",
     "self._latent_mean(context, latents[:, :0]))", LATENT),
    ("latent: its log-likelihood is a mean", L, "of_latents.sum(-1)", "of_latents.mean(-1)", LATENT),
    ("latent: exits before latents", L, "torch.stack([latents[:, :-1], exits], 2)",
     "torch.stack([exits, latents[:, :-1]], 2)", LATENT),
    ("latent: demonstrated latents are decisions", L, ' & ~sampled["demonstrated"])', ")", LATENT),
    ("latent: demonstrations do not reach what draws latents", L, "resampled = means[k] + self.latent_std",
     "resampled = means[k].detach() + self.latent_std", LATENT),
    ("latent: demonstrated actions read latents after the exit", L,
     "self._action_mean(context, latents.where(mask[..., None], 0), mask)",
     "self._action_mean(context, latents, mask)", LATENT),
    ("latent: demonstrations never take all latents", L, "torch.randint(1, self.steps + 1,",
     "torch.randint(1, self.steps,", LATENT),
    ("latent: the divergence of actions the other way round", L, "gaussian_divergence(other_parts[2], action)",
     "gaussian_divergence(action, other_parts[2])", LATENT),
    ("latent: the divergence of exits the other way round", L, "bernoulli_divergence(other_parts[1], exit_logit)",
     "bernoulli_divergence(exit_logit, other_parts[1])", LATENT),
    ("latent: an exit's entropy without its no", L, " - (-logit).sigmoid() * F.logsigmoid(-logit)", "", LATENT),
    ("latent: the chance to go on for that to end", L, 'get_parameter("bias"), log_odds)',
     'get_parameter("bias"), -log_odds)', LATENT),
    ("latent: its saved standard deviation is not looked at", "mmrl/policies/vla/heads/gaussian_settings.py",
     '"latent", "latent_std", "early_exit")', '"latent", "early_exit")', LATENT),
    ("latent: evaluations do not tell how much it reasons", "mmrl/policies/vla/policy.py", "if head.samples_latents:",
     "if head.samples_latents and options.training:", LATENT),
    ("latent: lost episodes cost what they reasoned", "tasks/manipulation/rewards.py",
     "return None if episode.lost else episode.reasoning", "return episode.reasoning", LATENT),
    ("latent: how much it reasons is not a metric", "tasks/manipulation/task.py", "if latents:", "if False:", COSTS),
]
