"""Explanations of the names of metrics, shown when the pointer is over a figure's title."""

from __future__ import annotations

from fnmatch import fnmatch

# The meaning of metrics by patterns of their names; the first pattern that matches counts.
EXPLANATIONS = {
    "evaluation/accuracy": "share of held-out prompts that are answered right",
    "evaluation/accuracy/*": "held-out accuracy of the prompts of this kind",
    "evaluation/standard_error": "standard error of the held-out accuracy",
    "evaluation/n": "held-out prompts that were evaluated",
    "evaluation/unscored": "share of held-out prompts without a score",
    "accuracy": "mean accuracy of the step's rollouts, sampled, on training prompts",
    "reward/*": "mean of this reward over the step's scored rollouts, before its weight",
    "guard/out_of_gamut": "share of pixel values beyond what a viewer can show: grows where a reward is exploited",
    "guard/second_scorer": "a score that is not trained on: falls where the scorer is learned and not the task",
    "guard/sharpness": "variance of the Laplacian of images: down is blur, up is noise or edges",
    "guard/diversity": "distance between the images of a group: near 0 they look alike",
    "guard/*": "a measure beside the reward that is not trained on",
    "loss": "the objective that is minimised, averaged over the step's updates",
    "grad_norm": "norm of the gradient before clipping; 0 where no group has unequal rewards",
    "lr": "learning rate",
    "entropy": "mean entropy of decisions, in nats",
    "kl": "estimated divergence from the reference policy",
    "surrogate/ratio": "mean of new over old probability",
    "surrogate/ratio_gap*": "largest distance of a ratio from 1 in the step: 0 with one update",
    "surrogate/clip_*": "share of decisions whose ratio is beyond the bound of the clip",
    "advantages/zero_variance_groups": "share of groups whose rewards are all equal, which teach nothing",
    "advantages/small_groups": "groups with fewer than two scored rollouts",
    "unscored": "share of rollouts without a reward: they teach nothing and never count as 0",
    "unscored/*": "share of rollouts that this reward could not score",
    "updates_skipped": "updates whose loss or gradient was not finite",
    "updates": "updates of the step",
    "response/length": "mean tokens of a response",
    "response/truncated": "share of responses that reached the limit of tokens",
    "correction/logp_gap": "mean distance between the engine's and the trainer's log-probabilities",
    "correction/effective_sample_size": "near 1: all rollouts count alike; far below: few carry the step",
    "generation/staleness": "steps between a rollout's weights and those that learn from it",
    "time/rollout": "seconds of generating and scoring the step's rollouts",
    "time/update": "seconds of the step's updates",
    "time/step": "seconds of the whole step",
    "time/*": "seconds of this part of a step",
    "throughput/*": "amount a second, over the whole step",
    "memory/*": "largest memory of a rank so far, GiB",
    "episode/success_at_end": "share of episodes that stand at their goal when they end",
    "episode/return": "sum of the simulator's rewards over an episode, mean over the step's episodes",
    "episode/*": "mean over the step's episodes",
    "environment/lost": "conversations that were lost to a failing environment",
    "control/*": "current value of this option, which follows a schedule or a metric",
    "critic/error": "mean squared error of the critic's values",
}


def explanation(name: str) -> str:
    """Returns what a metric means; "" for one that is not described."""
    return next((text for pattern, text in EXPLANATIONS.items() if fnmatch(name, pattern)), "")
