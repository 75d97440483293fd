"""Object detectors behind one interface: images in, labelled boxes with scores out.

kind: `onnx`, a file as `OnnxDetector` describes (scripts/convert_detectors.py makes two from packaged weights);
`transformers`, any model for object detection, by folder or hub name; `torchvision`, one of its detectors by name, with
a file of weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import nn

from mmrl.rewards.overlap import Box
from mmrl.rewards.types import device_of, nearest
from mmrl.runtime.installation import extra_command

COCO = (
    *("person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat", "traffic light"),
    *("fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat", "dog", "horse", "sheep", "cow"),
    *("elephant", "bear", "zebra", "giraffe", "backpack", "umbrella", "handbag", "tie", "suitcase", "frisbee"),
    *("skis", "snowboard", "sports ball", "kite", "baseball bat", "baseball glove", "skateboard", "surfboard"),
    *("tennis racket", "bottle", "wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple"),
    *("sandwich", "orange", "broccoli", "carrot", "hot dog", "pizza", "donut", "cake", "chair", "couch"),
    *("potted plant", "bed", "dining table", "toilet", "tv", "laptop", "computer mouse", "tv remote"),
    *("computer keyboard", "cell phone", "microwave", "oven", "toaster", "sink", "refrigerator", "book", "clock"),
    *("vase", "scissors", "teddy bear", "hair drier", "toothbrush"),
)  # classes in the order of the data set, with the names that GenEval uses
# GenEval's names of classes, by COCO's names.
GENEVAL_NAMES = {"mouse": "computer mouse", "remote": "tv remote", "keyboard": "computer keyboard"}
MAX_IOU = 0.5  # of two boxes of one label that non-maximum suppression keeps


@dataclass(frozen=True)
class DetectedObject:
    """One detected object. score: 0 to 1."""

    label: str
    score: float
    box: Box  # in pixels of the image


class Detector(Protocol):
    """A detector of objects of the classes `labels`."""

    labels: tuple[str, ...]

    def detect(self, images: Sequence[Image.Image], min_score: float) -> list[list[DetectedObject]]:
        """Returns the objects of each RGB image with a score of at least `min_score`, highest first."""
        ...


class OnnxDetector:
    """A detector in an ONNX file.

    Its input `image` is float32 [1, 3, side, side], RGB of 0 to 255. Its outputs are `boxes` [1, n, 4] (left, top,
    right, bottom in pixels of that input) and `scores` [1, n, label], 0 to 1. Its metadata `labels` is the JSON list of
    labels. Images are letterboxed with white margins. Raises ValueError if there is no such file, or it is not of this
    form.
    """

    def __init__(self, path: str, threads: int = 1) -> None:
        if not Path(path).is_file():
            raise ValueError(f"there is no detector file {path}; scripts/convert_detectors.py makes one")
        try:
            import onnxruntime
        except ImportError as error:
            raise ValueError(f"a detector of kind onnx needs: {extra_command('detector')} ({error})") from error
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        inputs, outputs = self._session.get_inputs(), {output.name for output in self._session.get_outputs()}
        stored = self._session.get_modelmeta().custom_metadata_map
        if [item.name for item in inputs] != ["image"] or not {"boxes", "scores"} <= outputs or "labels" not in stored:
            raise ValueError(
                f"detector {path} must have the input `image`, the outputs `boxes` and `scores`, and `labels` in its "
                "metadata; scripts/convert_detectors.py makes such a file"
            )
        self._side = int(inputs[0].shape[2])
        self.labels: tuple[str, ...] = tuple(json.loads(stored["labels"]))

    def detect(self, images: Sequence[Image.Image], min_score: float) -> list[list[DetectedObject]]:
        return [self._detect_one(image, min_score) for image in images]

    def _detect_one(self, image: Image.Image, min_score: float) -> list[DetectedObject]:
        """Detects the objects of one image, which is letterboxed on white to the model's square input. Boxes are in
        pixels of the image."""
        scale = self._side / max(image.size)
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        left, top = (self._side - size[0]) // 2, (self._side - size[1]) // 2
        letterboxed = Image.new("RGB", (self._side, self._side), "white")
        letterboxed.paste(image.resize(size, Image.Resampling.BILINEAR), (left, top))
        pixels = np.asarray(letterboxed, np.float32).transpose(2, 0, 1)[None]
        boxes, scores = self._session.run(["boxes", "scores"], {"image": np.ascontiguousarray(pixels)})
        image_boxes = (boxes[0] - np.array([left, top, left, top], np.float32)) / scale
        sides = np.array([image.width, image.height] * 2, np.float32)
        return to_objects(
            torch.from_numpy(np.clip(image_boxes, 0, sides)), torch.from_numpy(scores[0]), self.labels, min_score
        )


class TransformersDetector:
    """An object detection model of transformers (DETR, RT-DETR, YOLOS ...) by folder or hub name. Raises ValueError if
    it cannot be loaded."""

    def __init__(self, path: str, device: str | None = None) -> None:
        from transformers import AutoImageProcessor, AutoModelForObjectDetection

        try:
            self._processor: Any = AutoImageProcessor.from_pretrained(path, trust_remote_code=False)
            model: Any = AutoModelForObjectDetection.from_pretrained(path, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ValueError(f"detector {path!r} cannot be loaded by transformers: {error}") from error
        self._model, self._device = model.eval().requires_grad_(False), device
        names = self._model.config.id2label
        self.labels = tuple(_name(names[number]) for number in sorted(names))
        self._names = {number: _name(name) for number, name in names.items()}

    @torch.no_grad()
    def detect(self, images: Sequence[Image.Image], min_score: float) -> list[list[DetectedObject]]:
        """Returns the objects of each image with a score of at least `min_score`, highest first."""
        device = device_of(self._device)
        self._model.to(device)
        inputs = self._processor(images=list(images), return_tensors="pt").to(device)
        sizes = [(image.height, image.width) for image in images]
        detections = self._processor.post_process_object_detection(self._model(**inputs), min_score, sizes)
        return [
            highest_first(
                DetectedObject(self._names[int(label)], float(score), _to_box(box))
                for label, score, box in zip(detection["labels"], detection["scores"], detection["boxes"], strict=True)
            )
            for detection in detections
        ]


class TorchvisionDetector:
    """A detector of torchvision.models by name, such as 'fasterrcnn_resnet50_fpn_v2', with the file of its published
    weights. Raises ValueError for an unknown name, and for weights that do not exist or do not fit."""

    def __init__(self, name: str, weights: str, device: str | None = None) -> None:
        from torchvision.models import detection, get_model, get_model_weights, list_models

        names = list_models(detection)
        if name not in names:
            raise ValueError(f"torchvision has no detector {name!r}{nearest(name, names)}; known: {', '.join(names)}")
        if not Path(weights).is_file():
            raise ValueError(f"weights: there is no file {weights}")
        model: nn.Module = get_model(name, weights=None, weights_backbone=None)
        try:
            model.load_state_dict(torch.load(weights, "cpu", weights_only=True))
        except RuntimeError as error:
            raise ValueError(f"weights {weights} are not of {name}: {str(error).splitlines()[0]}") from error
        self._model, self._device = model.eval().requires_grad_(False), device
        categories = next(iter(get_model_weights(name))).meta["categories"]
        self._names = [_name(category) for category in categories]
        self.labels = tuple(name for name in self._names if name not in ("__background__", "N/A"))

    @torch.no_grad()
    def detect(self, images: Sequence[Image.Image], min_score: float) -> list[list[DetectedObject]]:
        """Returns the objects of each image with a score of at least `min_score`, highest first."""
        device = device_of(self._device)
        self._model.to(device)
        tensors = [torch.from_numpy(np.array(image)).permute(2, 0, 1).to(device) / 255 for image in images]
        return [
            highest_first(
                DetectedObject(self._names[int(label)], float(score), _to_box(box))
                for label, score, box in zip(
                    detections["labels"], detections["scores"], detections["boxes"], strict=True
                )
                if score >= min_score
            )
            for detections in self._model(tensors)
        ]


KINDS: dict[str, Any] = {"onnx": OnnxDetector, "transformers": TransformersDetector, "torchvision": TorchvisionDetector}


def detector(options: Mapping[str, Any]) -> Detector:
    """Builds a detector. options: `kind` and the arguments of its class. Raises ValueError for an unknown kind or
    option, and if the class raises it."""
    arguments = dict(options)
    kind = arguments.pop("kind", None)
    if kind not in KINDS:
        raise ValueError(f"detector.kind must be one of {', '.join(KINDS)}, not {kind!r}")
    try:
        return KINDS[kind](**arguments)
    except TypeError as error:
        raise ValueError(f"detector of kind {kind}: {error}") from None


def to_objects(
    boxes: torch.Tensor, scores: torch.Tensor, labels: Sequence[str], min_score: float
) -> list[DetectedObject]:
    """Converts boxes [n, 4] and scores [n, label] to objects with a score of at least `min_score`, highest first, after
    non-maximum suppression within each label."""
    from torchvision.ops import batched_nms  # not above: the import takes two seconds, also in jobs without detectors

    index, label = (scores >= min_score).nonzero(as_tuple=True)
    confidences = scores[index, label]
    selected = batched_nms(boxes[index], confidences, label, MAX_IOU)
    return [DetectedObject(labels[int(label[i])], float(confidences[i]), _to_box(boxes[index[i]])) for i in selected]


def highest_first(objects: Iterable[DetectedObject]) -> list[DetectedObject]:
    """Sorts objects by score, highest first."""
    return sorted(objects, key=lambda detected: -detected.score)


def _to_box(box: torch.Tensor) -> Box:
    left, top, right, bottom = box.tolist()
    return left, top, right, bottom


def _name(label: str) -> str:
    """Returns GenEval's name of a class."""
    return GENEVAL_NAMES.get(label, label)
