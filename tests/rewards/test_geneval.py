"""GenEval's checks by value: what counts as there, as many, of a colour and where; and detectors of every kind."""

import json
import struct

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.errors import UserError
from mmrl.rewards.registry import build
from mmrl.rewards.visual import geneval
from mmrl.rewards.visual.detectors import COCO, DetectedObject, OnnxDetector, TransformersDetector, detector, to_objects
from mmrl.rewards.visual.geneval import GenEval, checks, color_of, relations
from mmrl.rollouts import Prompt, Sample

WHITE = Image.new("RGB", (100, 100), "white")


def box(x, y, side=20):
    return (float(x), float(y), float(x + side), float(y + side))


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (box(0, 40), box(60, 40), {"left of"}),
        (box(60, 40), box(0, 40), {"right of"}),
        (box(40, 0), box(40, 60), {"above"}),
        (box(40, 60), box(40, 0), {"below"}),
        (box(0, 0), box(60, 60), {"left of", "above"}),
        (box(40, 40), box(43, 40), set()),  # apart by 3 of 4 pixels of margin
        (box(40, 40), box(48, 40), set()),  # by 8: 4 beyond the margin, which is no more than half of 8
        (box(40, 40), box(49, 40), {"left of"}),  # 5 of 9
        (box(0, 40), box(60, 80), {"left of"}),  # down 36 beyond the margin, of a way of 72.1: just below half
        (box(0, 40), box(60, 81), {"left of", "above"}),  # 37 of 72.7
    ],
)
def test_relations_of_boxes(first, second, told):
    assert relations(first, second) == told


def found(*objects):
    return [DetectedObject(label, 0.9, where) for label, where in objects]


def verdict(objects, include, exclude=()):
    return checks(objects, WHITE, {"include": list(include), "exclude": list(exclude)})


def test_at_least_so_many_and_fewer_than_excluded():
    dogs = found(("dog", box(0, 0)), ("dog", box(50, 0)), ("cat", box(0, 50)))
    two, three = ({"class": "dog", "count": n} for n in (2, 3))
    assert verdict(dogs, [two], [three]) == {"0 object": True, "exclude 0": True}
    assert verdict(dogs, [three]) == {"0 object": False}
    assert verdict(dogs, [{"class": "dog", "count": 1}], [two]) == {"0 object": True, "exclude 0": False}
    assert verdict([], [two, {"class": "cat", "count": 1}]) == {"0 object": False, "1 object": False}


def test_positions_are_those_of_the_object_that_is_told():
    scene = found(("dog", box(0, 40)), ("cat", box(60, 40)))
    cat = {"class": "cat", "count": 1}
    left = {"class": "dog", "count": 1, "position": ["left of", 1]}
    assert verdict(scene, [left, cat])["0 position"]
    assert not verdict(scene, [{**left, "position": ["right of", 1]}, cat])["0 position"]
    assert verdict(scene, [cat, {"class": "dog", "count": 1, "position": ["left of", 0]}])["1 position"]
    assert verdict(found(("dog", box(0, 40))), [left, cat]) == {
        "0 object": True, "0 position": False, "1 object": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("paint", "name"),
    [
        ((220, 20, 20), "red"), ((255, 140, 0), "orange"), ((250, 230, 30), "yellow"), ((30, 160, 40), "green"),
        ((30, 60, 220), "blue"), ((130, 30, 200), "purple"), ((255, 120, 190), "pink"), ((110, 65, 25), "brown"),
        ((10, 10, 10), "black"), ((245, 245, 245), "white"), ((128, 128, 128), "gray"),
    ],
)  # fmt: skip
def test_colours_are_named_without_what_surrounds_them(paint, name):
    for ground in ((60, 90, 120), (200, 190, 150)):
        image = Image.new("RGB", (100, 100), ground)
        image.paste(paint, (30, 30, 60, 70))
        assert color_of(image, (25.0, 25.0, 65.0, 75.0)) == name
    assert geneval.COLORS.index(name) >= 0


def test_a_colour_counts_for_as_many_objects_as_are_asked_for():
    image = WHITE.copy()
    image.paste((220, 20, 20), (5, 5, 25, 25))
    image.paste((30, 60, 220), (55, 5, 75, 25))
    objects = found(("cup", (3.0, 3.0, 27.0, 27.0)), ("cup", (53.0, 3.0, 77.0, 27.0)))
    asked = {"class": "cup", "count": 2, "color": "red"}
    assert checks(objects, image, {"include": [asked]}) == {"0 object": True, "0 color": False}
    one = {"class": "cup", "count": 1, "color": "red"}
    assert checks(objects[:1], image, {"include": [one]})["0 color"]
    assert not checks(objects[1:], image, {"include": [one]})["0 color"]


def test_weaker_boxes_of_one_label_are_left_out():
    boxes = torch.tensor([[0, 0, 10, 10], [1, 0, 11, 10], [20, 0, 30, 10], [0, 0, 10, 10.0]])
    scores = torch.tensor([[0.6, 0], [0.9, 0], [0.5, 0.3], [0, 0.8]])
    made = to_objects(boxes, scores, ("cat", "dog"), 0.4)
    assert [(one.label, round(one.score, 2), one.box[0]) for one in made] == [
        ("cat", 0.9, 1.0), ("dog", 0.8, 0.0), ("cat", 0.5, 20.0),
    ]  # fmt: skip


def field(number, value):
    """One field of a protocol buffer: bytes, or a whole number."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value):
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def value_info(name, shape):
    dims = b"".join(field(1, field(1, size)) for size in shape)
    kind = field(1, field(1, 1) + field(2, dims))
    return field(1, name.encode()) + field(2, kind)


def constant(name, values):
    data = struct.pack(f"<{values.size}f", *values.flatten())
    tensor = b"".join(field(1, size) for size in values.shape) + field(2, 1) + field(9, data)
    attribute = field(1, b"value") + field(5, tensor) + field(20, 4)
    return field(2, name.encode()) + field(4, b"Constant") + field(5, attribute)


def onnx_file(path, boxes, scores, labels, extra=b"", names=("boxes", "scores")):
    """A detector that finds the same boxes in every image of 40 x 40, in bytes; no package is needed to write it."""
    made = [field(1, constant(name, values)) for name, values in zip(names, (boxes, scores), strict=True)]
    graph = b"".join(made) + field(2, b"g") + field(11, value_info("image", (1, 3, 40, 40)))
    graph += b"".join(field(12, value_info(n, v.shape)) for n, v in zip(names, (boxes, scores), strict=True))
    stored = b"" if labels is None else field(14, field(1, b"labels") + field(2, json.dumps(labels).encode()))
    path.write_bytes(field(1, 8) + field(7, graph) + field(8, field(2, 17)) + stored + extra)
    return str(path)


def fixed(tmp_path, **more):
    boxes = np.array([[[0, 10, 20, 30], [20, 10, 40, 30]]], np.float32)
    scores = np.array([[[0.8, 0.1], [0.2, 0.5]]], np.float32)
    return onnx_file(tmp_path / "fixed.onnx", boxes, scores, ["dog", "cat"], **more)


def test_boxes_of_an_onnx_file_come_back_in_pixels_of_the_image(tmp_path):
    pytest.importorskip("onnxruntime")
    judge = OnnxDetector(fixed(tmp_path))
    assert judge.labels == ("dog", "cat")
    (wide,) = judge.detect([Image.new("RGB", (80, 40))], 0.3)  # made half as large, 10 pixels of margin above
    assert [(one.label, one.box) for one in wide] == [("dog", (0.0, 0.0, 40.0, 40.0)), ("cat", (40.0, 0.0, 80.0, 40.0))]
    (tall,) = judge.detect([Image.new("RGB", (20, 40))], 0.6)  # margins of 10 left and right
    assert [(one.label, one.box) for one in tall] == [("dog", (0.0, 10.0, 10.0, 30.0))]


def sample(include, image=None, **asked):
    prompt = Prompt("p", "a dog", metadata={"tag": "position", "include": include, **asked})
    return Sample(prompt, image=torch.zeros(3, 40, 80) if image is None else image)


def test_the_reward_from_its_name_to_a_number(tmp_path):
    pytest.importorskip("onnxruntime")
    path = fixed(tmp_path)
    dog = {"class": "dog", "count": 1, "position": ["left of", 1]}
    wrong = {"class": "dog", "count": 1, "position": ["right of", 1]}
    cat = {"class": "cat", "count": 1}
    samples = [sample([dog, cat]), sample([wrong, cat]), sample([cat], torch.full((3, 4, 4), torch.nan))]
    given = {"detector": {"kind": "onnx", "path": path}}
    assert build("geneval", given).score(samples) == [1.0, 0.0, None]
    assert build("geneval", {**given, "partial": True}).score(samples) == [1.0, pytest.approx(2 / 3), None]
    assert build("geneval", {**given, "threshold": 0.6}).score(samples[:1]) == [0.0]  # the cat's score is 0.5
    counted = [sample([cat], tag="counting")]
    assert build("geneval", given).score(counted) == [0.0]
    assert build("geneval", {**given, "count_threshold": 0.5}).score(counted) == [1.0]


def test_prompts_and_detectors_that_do_not_fit_are_named(tmp_path):
    pytest.importorskip("onnxruntime")
    reward = GenEval(detector={"kind": "onnx", "path": fixed(tmp_path)})
    for asked, said in (
        ([{"class": "dgo", "count": 1}], "has no class 'dgo' .did you mean 'dog'"),
        ([{"class": "dog", "count": 1, "color": "teal"}], "color must be one of red"),
        ([], "has no key `include`"),
    ):
        with pytest.raises(UserError, match=said):
            reward.score([sample(asked)])
    with pytest.raises(ValueError, match="kind must be one of onnx, transformers, torchvision, not 'yolo'"):
        detector({"kind": "yolo"})
    with pytest.raises(ValueError, match="there is no detector file nowhere.onnx"):
        detector({"kind": "onnx", "path": "nowhere.onnx"})
    with pytest.raises(ValueError, match="`labels` in its metadata"):
        OnnxDetector(onnx_file(tmp_path / "b.onnx", np.zeros((1, 1, 4)), np.zeros((1, 1, 2)), None))
    with pytest.raises(ValueError, match="no detector 'fasterrcnn'"):
        detector({"kind": "torchvision", "name": "fasterrcnn", "weights": "x"})
    with pytest.raises(ValueError, match="unexpected keyword argument 'size'"):
        detector({"kind": "onnx", "path": "x", "size": 3})
    with pytest.raises(ValueError, match="must be from 0 to 1"):
        GenEval(detector={"kind": "onnx", "path": "x"}, threshold=2)


def test_a_model_of_transformers_says_what_its_own_processor_does(tmp_path):
    from transformers import YolosConfig, YolosForObjectDetection, YolosImageProcessor

    names = {0: "cat", 1: "mouse", 2: "N/A"}
    torch.manual_seed(0)
    config = YolosConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=[32, 48],
        patch_size=16, num_detection_tokens=6, id2label=names, label2id={v: k for k, v in names.items()},
    )  # fmt: skip
    model = YolosForObjectDetection(config)
    processor = YolosImageProcessor(size={"height": 32, "width": 48})
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    images = [Image.new("RGB", (60, 40), "red"), Image.new("RGB", (60, 40), "blue")]
    judge = TransformersDetector(str(tmp_path), "cpu")
    made = judge.detect(images, 0.0)
    assert judge.labels == ("cat", "computer mouse", "N/A")
    with torch.no_grad():
        raw = model.eval()(**processor(images=images, return_tensors="pt"))
    for number, one in enumerate(made):
        scores = raw.logits[number].softmax(-1)[:, :-1].max(-1)
        assert [f.score for f in one] == pytest.approx(sorted(scores.values.tolist(), reverse=True), abs=1e-5)
        best = int(scores.values.argmax())
        x, y, w, h = raw.pred_boxes[number, best].tolist()
        assert one[0].box == pytest.approx(
            (60 * (x - w / 2), 40 * (y - h / 2), 60 * (x + w / 2), 40 * (y + h / 2)), abs=1e-3
        )
        assert one[0].label == judge.labels[int(scores.indices[best])]


def test_a_detector_of_torchvision_reads_its_weights(tmp_path):
    from torchvision.models.detection import ssdlite320_mobilenet_v3_large

    torch.manual_seed(0)
    model = ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None)
    torch.save(model.state_dict(), tmp_path / "w.pth")
    name = "ssdlite320_mobilenet_v3_large"
    judge = detector({"kind": "torchvision", "name": name, "weights": str(tmp_path / "w.pth"), "device": "cpu"})
    assert len(judge.labels) == 80 and set(judge.labels) == set(COCO)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 90, 3), dtype=np.uint8))
    (made,) = judge.detect([image], 0.0)
    with torch.no_grad():
        (raw,) = model.eval()([torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255])
    assert made and made[0].score == pytest.approx(float(raw["scores"].max()))
    assert [one.score for one in made] == sorted((one.score for one in made), reverse=True)
    torch.save({"a": torch.zeros(1)}, tmp_path / "bad.pth")
    with pytest.raises(ValueError, match="are not of ssdlite320"):
        detector({"kind": "torchvision", "name": name, "weights": str(tmp_path / "bad.pth")})
