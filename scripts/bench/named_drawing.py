"""Named images that runs draw: held-out accuracy, and how sharp and how different those are that are right.

    .venv/bin/python scripts/bench/named_drawing.py RUN [RUN ...] [--images 480]

RUN: runs of image_named_images*.yaml that reached their end. Each draws the same held-out prompts, twenty a name. A
careless base draws different things where one was requested, and so has the greater diversity within a prompt's group:
here it is that of images which show the same thing, as is their sharpness. Prints a Markdown table, whose last row is
of real images, as many of each name.

accuracy   share that the held-out scorer, which learned from the style that is drawn, takes for the requested thing
reward     probability of the requested thing by the scorer that rewards, which learned from another style
diversity  `mmrl.rewards.guards.diversity` of the images of one name which the held-out scorer names rightly
sharpness  of the same images
gamut      share of values out of gamut, of all images
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from mmrl import Job
from mmrl.rewards.guards import diversity, out_of_gamut, sharpness
from mmrl.rollouts import Sample
from mmrl.tasks.image_generation.data.named_images import NAMES, Recognised, real_images

COLUMNS = ("accuracy", "reward", "diversity", "sharpness", "gamut")


def main(runs: list[Path], images: int) -> None:
    print(f"| images of | {' | '.join(COLUMNS)} |\n|{' --- |' * (len(COLUMNS) + 1)}")
    for run in runs:
        with Job.from_weights(run) as job:
            row(run.name, job.sample(images))
    row("real things", real_images(images))


def row(name: str, samples: list[Sample]) -> None:
    print(f"| {name} | {' | '.join(f'{measured(samples)[column]:.3f}' for column in COLUMNS)} |", flush=True)


def measured(samples: list[Sample]) -> dict[str, float]:
    """A number for each of COLUMNS."""
    shown = torch.stack([sample.image for sample in samples if sample.image is not None])
    right = torch.tensor(Recognised(judge="second").score(samples)) == 1
    asked = torch.tensor([NAMES.index(sample.prompt.metadata["name"]) for sample in samples])
    return {
        "accuracy": right.float().mean().item(),
        "reward": torch.tensor(Recognised(judge="reward", soft=True).score(samples)).mean().item(),
        "diversity": by_name(diversity(shown[right], asked[right]), asked[right]),
        "sharpness": by_name(sharpness(shown[right]), asked[right]),
        "gamut": out_of_gamut(shown).mean().item(),
    }


def by_name(values: Tensor, asked: Tensor) -> float:
    """The mean over names of each one's mean, so that a name which is often right does not count for more. Of a name
    that is right once there is no diversity, and it is left out."""
    of_each = torch.stack([values[asked == name].mean() for name in asked.unique().tolist()])
    return of_each[of_each.isfinite()].mean().item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--images", type=int, default=480)
    main(**vars(parser.parse_args()))
