"""The user's video prompts, of which a share is held out."""

from __future__ import annotations

from mmrl.rollouts import Prompt


def hold_out(prompts: list[Prompt], share: float) -> tuple[list[Prompt], list[Prompt]]:
    """Splits prompts into those to train on and those held out: every n-th, so that about `share` of them are. Raises
    ValueError where one of the two would be empty."""
    every = round(1 / share)
    heldout = prompts[every - 1 :: every]
    train = [prompt for n, prompt in enumerate(prompts, 1) if n % every]
    if not heldout or not train:
        raise ValueError(f"{len(prompts)} prompts are too few to hold out a share of {share:g}; give eval a file")
    return train, heldout
