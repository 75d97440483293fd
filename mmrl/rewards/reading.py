"""Text in images, read by RapidOCR on the CPU (the extra `ocr`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from PIL import Image

from mmrl.runtime.installation import extra_command

MISSING = f"reading text needs the extra `ocr`: {extra_command('ocr')}"


def check_engine() -> None:
    """Raises ValueError where the engine is not installed; does not load it."""
    if importlib.util.find_spec("rapidocr_onnxruntime") is None:
        raise ValueError(MISSING)


@lru_cache
def reader(threads: int) -> Callable[[Image.Image], list[str]]:
    """A function from an image to the texts in it, from top to bottom. Raises ValueError without the engine."""
    try:
        from rapidocr_onnxruntime import RapidOCR
    except ImportError as error:
        raise ValueError(f"{MISSING} ({error})") from error
    # As Flow-GRPO's reader: no enlarging of small images (fifty times the time) and no turned text.
    engine = RapidOCR(intra_op_num_threads=threads, det_limit_type="max", use_cls=False)

    def read(image: Image.Image) -> list[str]:
        lines, _ = engine(np.asarray(image.convert("RGB"))[:, :, ::-1])  # it expects BGR
        return [text for _, text, _ in lines or []]

    return read
