"""Images of nothing that one detector takes for an object, shown to another: why `image_detector` has a second judge.

    python scripts/convert_detectors.py package/models detectors
    python scripts/fool_detector.py package/models detectors/centernet.onnx

From grey noise the gradient of NanoDet's best score for a class is followed (fast gradient sign, arXiv 1412.6572, many
small steps), as a policy would that is rewarded by NanoDet alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from convert_detectors import NanoDet
from PIL import Image
from torch import Tensor

from mmrl.rewards.visual.detectors import COCO, detector

CLASSES = ("dog", "zebra", "banana", "bus", "clock")


def fooled(model: NanoDet, label: str, steps: int, size: float) -> tuple[Tensor, float]:
    """An image [1, 3, side, side] of 0 to 255 and the model's best score for `label` in it."""
    noise = torch.rand(1, 3, model.side, model.side, generator=torch.Generator().manual_seed(0))
    image = 112 + 32 * noise
    for _ in range(steps):
        image.requires_grad_(True)
        best = model(image)[1][0, :, COCO.index(label)].topk(20).values.sum()
        (slope,) = torch.autograd.grad(best, image)
        image = (image.detach() + size * slope.sign()).clamp(0, 255)
    rounded = image.round()
    with torch.no_grad():
        return rounded, float(model(rounded)[1][0, :, COCO.index(label)].max())


def main() -> None:
    parser = argparse.ArgumentParser(description="Fool NanoDet, and ask another detector.")
    parser.add_argument("models", type=Path, help="the npm package's folder of models")
    parser.add_argument("judge", help="ONNX file of the other detector")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--size", type=float, default=2.0, help="of a step, of 255")
    options = parser.parse_args()
    model, judge = NanoDet(options.models / "nanodet.json"), detector({"kind": "onnx", "path": options.judge})
    for label in CLASSES:
        image, score = fooled(model, label, options.steps, options.size)
        shown = Image.fromarray(image[0].permute(1, 2, 0).to(torch.uint8).numpy())
        (found,) = judge.detect([shown], 0.0)
        told = max((one.score for one in found if one.label == label), default=0.0)
        print(f"{label:8} NanoDet {score:.2f}, {Path(options.judge).stem} {told:.2f}")


if __name__ == "__main__":
    main()
