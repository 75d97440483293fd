"""A TensorFlow.js graph model, read and computed with torch: the operations that two small detectors need.

The format: MODEL.json holds nodes (TensorFlow's NodeDef) and a manifest of the weights, which lie in .bin files
beside it. Tensors are [batch, height, width, channel], as TensorFlow has them.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attributes = Mapping[str, Any]
TYPES: dict[int | str, torch.dtype] = {1: torch.float32, 3: torch.int32, "DT_FLOAT": torch.float32}
TYPES |= {"DT_INT32": torch.int32, "DT_BOOL": torch.bool, 10: torch.bool}


class GraphModel(nn.Module):
    """The graph of `path`; calling it with the input gives the requested outputs, by name."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        stored = json.loads(path.read_text())
        self.nodes = {node["name"]: node for node in stored["modelTopology"]["node"]}
        self.weights = _weights(stored["weightsManifest"], path.parent)
        self.input = next(name for name, node in self.nodes.items() if node["op"] == "Placeholder")
        self.outputs = {
            name.partition(":")[0]: [int(size["size"]) for size in held["tensorShape"]["dim"]]
            for name, held in stored["signature"]["outputs"].items()
        }

    def forward(self, given: Tensor, outputs: Sequence[str]) -> list[Tensor]:
        known: dict[str, Any] = {self.input: given}
        for name in self._order(outputs):
            node = self.nodes[name]
            inputs = [_port(known, source) for source in node.get("input", [])]
            known[name] = self.weights[name] if node["op"] == "Const" else _compute(node, inputs)
        return [known[name] for name in outputs]

    def _order(self, outputs: Sequence[str]) -> list[str]:
        order: list[str] = []
        seen, open_ = {self.input}, [(name, False) for name in reversed(outputs)]
        while open_:
            name, done = open_.pop()
            if done:
                order.append(name)
            elif name not in seen:
                seen.add(name)
                open_.append((name, True))
                open_ += [(source.partition(":")[0], False) for source in self.nodes[name].get("input", [])]
        return order


def _weights(manifest: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, Tensor]:
    found = {}
    for group in manifest:
        stored, place = b"".join((folder / part).read_bytes() for part in group["paths"]), 0
        for weight in group["weights"]:
            packed = weight.get("quantization")
            kind = np.dtype(packed["dtype"] if packed else weight["dtype"])
            count = math.prod(weight["shape"])
            values = np.frombuffer(stored, kind, count, place).reshape(weight["shape"])
            place += count * kind.itemsize
            if packed:
                values = values.astype(np.float32) * packed.get("scale", 1) + packed.get("min", 0)
            found[weight["name"]] = torch.from_numpy(np.array(values))
    return found


def _port(known: Mapping[str, Any], source: str) -> Tensor:
    name, _, port = source.partition(":")
    value = known[name]
    return value[int(port or 0)] if isinstance(value, list | tuple) else value


def _compute(node: Mapping[str, Any], inputs: list[Any]) -> Any:
    if node["op"] not in OPERATIONS:
        raise NotImplementedError(f"node {node['name']}: operation {node['op']} is not known here")
    return OPERATIONS[node["op"]](inputs, node.get("attr", {}))


def _ints(values: Tensor) -> list[int]:
    return [int(value) for value in values.flatten().tolist()]


def _listed(attributes: Attributes, key: str) -> list[int]:
    return [int(value) for value in attributes.get(key, {}).get("list", {}).get("i", [])]


def _text(value: str) -> str:
    return base64.b64decode(value).decode()


def _padded(image: Tensor, kernel: Sequence[int], stride: Sequence[int], value: float = 0.0) -> Tensor:
    """[n, channel, height, width] with TensorFlow's SAME margins."""
    margins: list[int] = []
    for side, size, step in reversed(list(zip(image.shape[2:], kernel, stride, strict=True))):
        missing = max((-(-side // step) - 1) * step + size - side, 0)
        margins += [missing // 2, missing - missing // 2]
    return F.pad(image, margins, value=value)


def _convolution(inputs: list[Tensor], attributes: Attributes, depthwise: bool) -> Tensor:
    image, weight = inputs[0].permute(0, 3, 1, 2), inputs[1]
    stride, dilation = _listed(attributes, "strides")[1:3], _listed(attributes, "dilations")[1:3]
    if dilation not in ([], [1, 1]):
        raise NotImplementedError("convolutions with dilation are not known here")
    if _text(attributes["padding"]["s"]) == "SAME":
        image = _padded(image, weight.shape[:2], stride)
    if depthwise:
        height, width, channels, times = weight.shape
        kernel = weight.permute(2, 3, 0, 1).reshape(channels * times, 1, height, width)
        made = F.conv2d(image, kernel, stride=stride, groups=channels)
    else:
        made = F.conv2d(image, weight.permute(3, 2, 0, 1), stride=stride)
    made, rest = made.permute(0, 2, 3, 1), iter(inputs[2:])
    for fused in attributes.get("fused_ops", {}).get("list", {}).get("s", []):
        name = _text(fused)
        made = made + next(rest) if name == "BiasAdd" else {"Relu": F.relu, "Relu6": F.relu6}[name](made)
    return made


def _pooled(inputs: list[Tensor], attributes: Attributes) -> Tensor:
    image, kernel, stride = inputs[0].permute(0, 3, 1, 2), _listed(attributes, "ksize")[1:3], None
    stride = _listed(attributes, "strides")[1:3]
    if _text(attributes["padding"]["s"]) == "SAME":
        image = _padded(image, kernel, stride, value=-1e30)
    return F.max_pool2d(image, kernel, stride).permute(0, 2, 3, 1)


def _resized(inputs: list[Tensor], attributes: Attributes) -> Tensor:
    image, size = inputs[0].permute(0, 3, 1, 2), _ints(inputs[1])
    corners = attributes.get("align_corners", {}).get("b", False)
    if corners or attributes.get("half_pixel_centers", {}).get("b", False):
        return F.interpolate(image, size=size, mode="bilinear", align_corners=corners).permute(0, 2, 3, 1)
    # TensorFlow's oldest rule: pixel i of the result lies at i * old / new, beyond the last pixel it is held.
    height, width = image.shape[2:]
    for axis, old, new in ((2, height, size[0]), (3, width, size[1])):
        place = torch.arange(new) * (old / new)
        low = place.floor().long()
        share = (place - low).view(-1, *[1] * (3 - axis))
        after = (low + 1).clamp(max=old - 1)
        image = image.index_select(axis, low) * (1 - share) + image.index_select(axis, after) * share
    return image.permute(0, 2, 3, 1)


def _spread(inputs: list[Tensor], attributes: Attributes) -> Tensor:
    made = torch.full(_ints(inputs[1]), float(inputs[3]), dtype=inputs[2].dtype)
    places = inputs[0].long()
    made[tuple((places if places.dim() == 2 else places[:, None]).T)] = inputs[2]
    return made


def _sliced(inputs: list[Tensor], attributes: Attributes) -> Tensor:
    begin, end, step = (_ints(one) for one in inputs[1:4])
    masks = [int(attributes.get(f"{name}_mask", {}).get("i", 0)) for name in ("begin", "end", "shrink_axis")]
    chosen: list[Any] = []
    for axis in range(len(begin)):
        first, last, single = (bool(mask >> axis & 1) for mask in masks)
        piece = slice(None if first else begin[axis], None if last else end[axis], step[axis])
        chosen.append(begin[axis] if single else piece)
    return inputs[0][tuple(chosen)]


def _margins(inputs: list[Tensor], attributes: Attributes) -> Tensor:
    pairs = _ints(inputs[1])
    flat = [size for axis in range(len(pairs) // 2 - 1, -1, -1) for size in pairs[2 * axis : 2 * axis + 2]]
    return F.pad(inputs[0], flat, value=float(inputs[2]) if len(inputs) > 2 else 0.0)


def _largest(inputs: list[Tensor], attributes: Attributes) -> list[Tensor]:
    found = inputs[0].topk(int(inputs[1]))
    return [found.values, found.indices.int()]


def _gathered(inputs: list[Tensor], attributes: Attributes) -> Tensor:
    values, places = inputs[0], inputs[1]
    axis = int(inputs[2])
    picked = values.index_select(axis, places.long().flatten())
    return picked.reshape(*values.shape[:axis], *places.shape, *values.shape[axis + 1 :])


def _mean(inputs: list[Tensor], attributes: Attributes) -> Tensor:
    return inputs[0].mean(tuple(_ints(inputs[1])), keepdim=attributes.get("keep_dims", {}).get("b", False))


OPERATIONS: dict[str, Callable[[list[Tensor], Attributes], Any]] = {
    "Identity": lambda i, a: i[0],
    "Transpose": lambda i, a: i[0].permute(_ints(i[1])),
    "Add": lambda i, a: i[0] + i[1],
    "AddV2": lambda i, a: i[0] + i[1],
    "BiasAdd": lambda i, a: i[0] + i[1],
    "Sub": lambda i, a: i[0] - i[1],
    "Mul": lambda i, a: i[0] * i[1],
    "FloorDiv": lambda i, a: torch.div(i[0], i[1], rounding_mode="floor"),
    "FloorMod": lambda i, a: torch.remainder(i[0], i[1]),
    "Equal": lambda i, a: i[0] == i[1],
    "Cast": lambda i, a: i[0].to(TYPES[a["DstT"]["type"]]),
    "Relu": lambda i, a: i[0].relu(),
    "Relu6": lambda i, a: F.relu6(i[0]),
    "LeakyRelu": lambda i, a: F.leaky_relu(i[0], a.get("alpha", {}).get("f", 0.2)),
    "Sigmoid": lambda i, a: i[0].sigmoid(),
    "ConcatV2": lambda i, a: torch.cat(i[:-1], int(i[-1])),
    "Reshape": lambda i, a: i[0].reshape(_ints(i[1])),
    "ExpandDims": lambda i, a: i[0].unsqueeze(int(i[1])),
    "SplitV": lambda i, a: list(torch.split(i[0], _ints(i[1]), int(i[2]))),
    "Mean": _mean,
    "Pad": _margins,
    "PadV2": _margins,
    "Conv2D": lambda i, a: _convolution(i, a, depthwise=False),
    "_FusedConv2D": lambda i, a: _convolution(i, a, depthwise=False),
    "DepthwiseConv2dNative": lambda i, a: _convolution(i, a, depthwise=True),
    "FusedDepthwiseConv2dNative": lambda i, a: _convolution(i, a, depthwise=True),
    "MaxPool": _pooled,
    "ResizeBilinear": _resized,
    "SparseToDense": _spread,
    "StridedSlice": _sliced,
    "TopKV2": _largest,
    "GatherV2": _gathered,
}
