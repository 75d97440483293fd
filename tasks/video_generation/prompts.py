"""A split of the user's video prompts."""

from __future__ import annotations

from mmrl.rollouts import Prompt


def hold_out(prompts: list[Prompt], share: float) -> tuple[list[Prompt], list[Prompt]]:
    """Splits prompts into training and held-out prompts. Every n-th prompt is held out, where n is 1 / share, rounded.
    Raises ValueError if a split is empty."""
    stride = round(1 / share)
    heldout = prompts[stride - 1 :: stride]
    train = [prompt for number, prompt in enumerate(prompts, 1) if number % stride]
    if not heldout or not train:
        raise ValueError(
            f"task.data.heldout={share:g} leaves {len(train)} training and {len(heldout)} held-out prompts, but both "
            "are needed; change heldout, or name a file of held-out prompts in task.data.eval"
        )
    return train, heldout
