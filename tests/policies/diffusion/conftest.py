"""Each class's tiny pipeline, written once a session and loaded once for each set of options."""

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.policies.diffusion import pipelines
from mmrl.policies.diffusion.settings import DiffusionModel
from tests.helpers.tiny_pipelines import build

CLASSES = ("sd3", "flux", "qwen_image", "aura_flow", "sd15", "sdxl")  # one pipeline of each class


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory) -> Callable[[str], Path]:
    torch.set_num_threads(1)
    return cache(lambda name: build(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session")
def shared_family(folder_of) -> Callable[..., pipelines.Pipeline]:
    """A family for tests that only look. Options are those of `DiffusionModel`."""
    loaded: dict[str, pipelines.Pipeline] = {}

    def load(name: str, **options: Any) -> pipelines.Pipeline:
        key = f"{name} {options}"
        if key not in loaded:
            loaded[key] = pipelines.load(str(folder_of(name)), DiffusionModel(**options))
        return loaded[key]

    return load


@pytest.fixture
def load_family(shared_family) -> Callable[..., pipelines.Pipeline]:
    """A family for tests that change it."""
    return lambda name, **options: copy.deepcopy(shared_family(name, **options))


@pytest.fixture(params=CLASSES)
def name(request) -> str:
    return request.param
