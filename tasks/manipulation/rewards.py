"""Rewards of an episode. They are None if the simulator failed during the episode (`lost`): it does not count."""

from __future__ import annotations

from mmrl.errors import UserError
from mmrl.rollouts import Episode, Sample


def success(sample: Sample) -> float | None:
    """Returns 1 if the task was solved at any time, else 0."""
    episode = episode_of(sample)
    return None if episode.lost else float(episode.success)


def success_at_end(sample: Sample) -> float | None:
    """Returns 1 if the task was solved at the end of the episode, else 0."""
    episode = episode_of(sample)
    return None if episode.lost else float(episode.success_at_end)


def simulator(sample: Sample) -> float | None:
    """Returns the sum of the simulator's rewards over the episode."""
    episode = episode_of(sample)
    return None if episode.lost else episode.reward


def reasoning(sample: Sample) -> float | None:
    """Returns the mean number of latents that were sampled before an action chunk; with a negative weight it is a cost
    of reasoning. None if the simulator failed. Raises UserError if the action head samples no latents."""
    episode = episode_of(sample)
    if episode.reasoning is None:
        raise UserError(
            "the reward `reasoning` counts the latents before an action chunk; it needs action.head.type=latent"
        )
    return None if episode.lost else episode.reasoning


def episode_of(sample: Sample) -> Episode:
    """Returns the episode of a sample. Raises UserError if its rollout is not an episode."""
    if sample.episode is None:
        raise UserError(
            f"the rollout of prompt {sample.prompt.id!r} is not an episode of a simulator, which this reward needs; "
            "use it with task.type=manipulation"
        )
    return sample.episode
