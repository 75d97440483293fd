"""The user's video prompts: text files with one prompt a line."""

from __future__ import annotations

from pathlib import Path

from mmrl.rollouts import Prompt


def load(path: Path) -> list[Prompt]:
    """Reads the prompts of a UTF-8 file, empty lines left out; ids are line numbers. Raises ValueError naming file and
    line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{path} can not be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise ValueError(f"{path} line {line} is not UTF-8") from None
    prompts = [Prompt(f"{path.name}:{n}", line.strip()) for n, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts


def hold_out(prompts: list[Prompt], share: float) -> tuple[list[Prompt], list[Prompt]]:
    """Splits prompts into those to train on and those held out: every n-th, so that about `share` of them are. Raises
    ValueError where one of the two would be empty."""
    every = round(1 / share)
    heldout = prompts[every - 1 :: every]
    train = [prompt for n, prompt in enumerate(prompts, 1) if n % every]
    if not heldout or not train:
        raise ValueError(f"{len(prompts)} prompts are too few to hold out a share of {share:g}; give eval a file")
    return train, heldout
