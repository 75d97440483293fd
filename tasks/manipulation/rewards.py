"""Rewards of an episode. None for one that the simulator lost: it is unscored, not a failure."""

from __future__ import annotations

from mmrl.errors import UserError
from mmrl.rollouts import Episode, Sample


def success(sample: Sample) -> float | None:
    """1 where the task was solved at any time."""
    episode = episode_of(sample)
    return None if episode.lost else float(episode.success)


def success_at_end(sample: Sample) -> float | None:
    """1 where the task was solved when the episode ended."""
    episode = episode_of(sample)
    return None if episode.lost else float(episode.success_at_end)


def simulator(sample: Sample) -> float | None:
    """The simulator's own rewards, summed over the episode."""
    episode = episode_of(sample)
    return None if episode.lost else episode.reward


def reasoning(sample: Sample) -> float | None:
    """Latents that were drawn before a chunk, on average (action.head=latent); with a negative weight, their cost.

    Raises UserError for a head that draws none."""
    episode = episode_of(sample)
    if episode.reasoning is None:
        raise UserError(
            "the reward `reasoning` counts latents before a chunk, which only action.head.type=latent draws"
        )
    return None if episode.lost else episode.reasoning


def episode_of(sample: Sample) -> Episode:
    """Returns the episode of a sample. Raises UserError where its rollout is none."""
    if sample.episode is None:
        raise UserError(f"the rollout of prompt {sample.prompt.id!r} is not an episode of a simulator")
    return sample.episode
