"""How often the reward `geneval` is right, for each kind of check, on scenes that are composed of real photographs.

    apt-get download tuxpaint-stamps-default && dpkg -x tuxpaint-stamps-default_*.deb stamps
    python scripts/convert_detectors.py package/models detectors
    python scripts/bench/detectors.py stamps/usr/share/tuxpaint/stamps detectors/nanodet.onnx detectors/centernet.onnx

The photographs are those of Tux Paint's stamps (GPL-2, not copied here) whose caption ends in a class of COCO. They are
pasted onto white. Each scene is scored with a prompt that is true, and with one that is false (another class, one more
object, the opposite position, another color). For the check of color whole objects are recolored.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmrl.rewards.visual.detectors import COCO, Detector, detector
from mmrl.rewards.visual.geneval import checks

SIDE = 416  # pixels of a scene
LARGEST = 180  # pixels of an object
KINDS = ("object", "count", "position", "color")
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
PAINTS = {"red": (220, 30, 30), "green": (40, 170, 50), "blue": (40, 70, 220), "yellow": (235, 215, 40)}
PHOTO = 800  # colours at 64 pixels; drawings have fewer


def photographs(folder: Path) -> dict[str, list[Path]]:
    """Photographs by class, of captions that are a class or end in one."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(folder.rglob("*.png")):
        told = path.with_suffix(".txt")
        if not told.is_file() or "cartoon" in str(path):
            continue
        caption = told.read_text(encoding="utf-8", errors="replace").splitlines()[0].strip(" .!").lower()
        for article in ("a ", "an ", "the "):
            caption = caption.removeprefix(article)
        label = next((name for name in COCO if caption == name or caption.endswith(f" {name}")), None)
        with Image.open(path) as image:
            small = np.asarray(image.convert("RGBA").resize((64, 64)))[..., :3].reshape(-1, 3)
        colours = len(np.unique(small, axis=0))
        if label is not None and colours > PHOTO:
            found[label].append(path)
    return dict(found)


def cutout(path: Path, side: int) -> Image.Image:
    with Image.open(path) as image:
        cut = image.convert("RGBA")
    box = cut.getchannel("A").getbbox()
    cut = cut.crop(box) if box else cut
    scale = side / max(cut.size)
    return cut.resize((max(1, round(cut.width * scale)), max(1, round(cut.height * scale))))


def painted(cut: Image.Image, colour: str) -> Image.Image:
    """The same object, light and shade kept, in another colour."""
    pixels = np.asarray(cut, np.float32)
    light = pixels[..., :3].mean(-1, keepdims=True) / 255
    made = np.array(PAINTS[colour], np.float32) * (0.35 + 0.65 * light)
    return Image.fromarray(np.concatenate([made, pixels[..., 3:]], -1).round().astype(np.uint8))


def scene(kind: str, photos: dict[str, list[Path]], rng: np.random.Generator) -> tuple[Image.Image, Any, Any]:
    """An image, what is true of it, and what is not; both as a prompt's metadata."""
    one, other = (str(name) for name in rng.choice(sorted(photos), 2, replace=False))
    cells = [(int(x), int(y)) for x, y in rng.permutation([(x, y) for x in (0, 1) for y in (0, 1)])]

    def cut(label: str) -> Image.Image:
        return cutout(photos[label][rng.integers(len(photos[label]))], int(rng.integers(150, LARGEST)))

    if kind == "object":
        shown = [(cut(one), cells[0])]
        true, false = _asked(one, 1), _asked(other, 1)
    elif kind == "count":
        count, single = int(rng.integers(1, 5)), photos[one][rng.integers(len(photos[one]))]
        shown = [(cutout(single, int(rng.integers(150, LARGEST))), cell) for cell in cells[:count]]
        true, false = _asked(one, count), _asked(one, count + 1)
    elif kind == "position":
        relation = str(rng.choice(sorted(OPPOSITE)))
        first, second = ((0, 0), (1, 0)) if "of" in relation else ((0, 0), (0, 1))
        if relation in ("right of", "below"):
            first, second = second, first
        shown = [(cut(one), first), (cut(other), second)]
        rest = {"class": other, "count": 1}
        made = [[{"class": one, "count": 1, "position": [r, 1]}, rest] for r in (relation, OPPOSITE[relation])]
        return _pasted(shown), {"include": made[0]}, {"include": made[1]}
    else:
        colour, wrong = (str(name) for name in rng.choice(sorted(PAINTS), 2, replace=False))
        shown = [(painted(cut(one), colour), cells[0])]
        true, false = (_asked(one, 1) | {"color": name} for name in (colour, wrong))
    more = {"exclude": [{"class": one, "count": true["count"] + 1}]} if kind == "count" else {}
    return _pasted(shown), {"include": [true], **more}, {"include": [false]}


def _asked(label: str, count: int) -> dict[str, Any]:
    return {"class": label, "count": count}


def _pasted(shown: list[tuple[Image.Image, tuple[int, int]]]) -> Image.Image:
    made, cell = Image.new("RGB", (SIDE, SIDE), "white"), SIDE // 2
    for cut, (x, y) in shown:
        made.paste(cut, (x * cell + (cell - cut.width) // 2, y * cell + (cell - cut.height) // 2), cut)
    return made


def agreement(
    judge: Detector, photos: dict[str, list[Path]], scenes: int, least: float
) -> dict[str, tuple[float, float]]:
    """By kind of check: share of true prompts that pass, and of wrong ones that fail."""
    rng, result = np.random.default_rng(0), {}
    for kind in KINDS:
        right = []
        for _ in range(scenes):
            image, true, false = scene(kind, photos, rng)
            (found,) = judge.detect([image], least)
            passed = [all(checks(found, image, asked).values()) for asked in (true, false)]
            right.append((passed[0], not passed[1]))
        result[kind] = (float(np.mean([a for a, _ in right])), float(np.mean([b for _, b in right])))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Agreement of detectors with the truth on composited scenes.")
    parser.add_argument("stamps", type=Path)
    parser.add_argument("detectors", nargs="+")
    parser.add_argument("--scenes", type=int, default=60, help="number of scenes for each kind of check")
    parser.add_argument("--least", type=float, default=0.4, help="least score of a detected object")
    parser.add_argument(
        "--known", action="store_true", help="use only photographs that every detector recognises alone"
    )
    options = parser.parse_args()
    photos = photographs(options.stamps)
    judges = {Path(path).stem: detector({"kind": "onnx", "path": path}) for path in options.detectors}
    if options.known:
        photos = _known(photos, list(judges.values()), options.least)
    print(f"{sum(map(len, photos.values()))} photographs of {len(photos)} classes: {', '.join(sorted(photos))}")
    for name, judge in judges.items():
        for kind, (passed, refused) in agreement(judge, photos, options.scenes, options.least).items():
            print(f"{name:12} {kind:9} true prompts pass {passed:.2f}, wrong ones fail {refused:.2f}")


def _known(photos: dict[str, list[Path]], judges: list[Detector], least: float) -> dict[str, list[Path]]:
    kept: dict[str, list[Path]] = defaultdict(list)
    for label, paths in photos.items():
        for path in paths:
            image = _pasted([(cutout(path, LARGEST), (0, 0))])
            named = [{one.label for one in judge.detect([image], least)[0]} for judge in judges]
            if all(label in names for names in named):
                kept[label].append(path)
    return dict(kept)


if __name__ == "__main__":
    main()
