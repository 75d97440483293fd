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
    """Raises ValueError if RapidOCR is not installed. Does not load it."""
    if importlib.util.find_spec("rapidocr_onnxruntime") is None:
        raise ValueError(MISSING)


@lru_cache
def reader(threads: int) -> Callable[[Image.Image], list[str]]:
    """Returns a function from an image to the lines of text in it, from top to bottom. threads: number of CPU threads.
    Raises ValueError if RapidOCR is not installed."""
    try:
        from rapidocr_onnxruntime import RapidOCR
    except ImportError as error:
        raise ValueError(f"{MISSING} ({error})") from error
    # As in Flow-GRPO: small images are not enlarged (that takes fifty times as long), and rotated text is not read.
    engine = RapidOCR(intra_op_num_threads=threads, det_limit_type="max", use_cls=False)

    def read(image: Image.Image) -> list[str]:
        lines, _ = engine(np.asarray(image.convert("RGB"))[:, :, ::-1])  # it expects BGR
        return [text for _, text, _ in lines or []]

    return read
