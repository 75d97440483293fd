"""Each family's tiny model, built once, and one batch of rollouts that mixes images and plain text."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.config import Config, validate
from mmrl.generation.sampling import Sampling
from mmrl.policies.vlm import policy as vlm
from mmrl.rollouts import Prompt, Rollouts
from tests.helpers.tiny_models import FAMILIES, build

LENGTH = 7


def image(width: int, height: int) -> Image.Image:
    random = np.random.default_rng(width)
    return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))


PROMPTS = [
    Prompt("two", "Which is the largest? <image> left <image> right", (image(40, 24), image(16, 56)), answer="9"),
    Prompt("none", "What is the sum of 3 and 4?", answer="12 and", system="Answer with one number."),
    Prompt("one", "What digit is shown in the image?", (image(48, 40),), answer="5"),
]


def configured(folder, *, sampling=None, logp_chunk=1024, **options) -> Config:
    """A job whose policy is in a folder. sampling: of rollouts; other options are keys of `rollout` or `model`."""
    drawn = sampling or Sampling()
    limits = {name: options.pop(name) for name in ("max_prompt_length", "max_response_length") if name in options}
    shape = {"temperature": drawn.temperature, "top_p": drawn.top_p, "top_k": drawn.top_k}
    tree = {
        "run_dir": "unset",
        "model": {"path": str(folder), **options},
        "rollout": {**shape, "allow_truncated_sampling": True, **limits},
        "engine": {"logp_chunk": logp_chunk, "zero_stage": 1},
    }
    return validate(tree, "test")


def loaded(folder, **options) -> vlm.VisionLanguagePolicy:
    config = configured(folder, **options)
    return config.model.load(config, None, str(folder))


def mixed(policy: vlm.VisionLanguagePolicy) -> Rollouts:
    """Sampled responses to all prompts and one shorter, given one to the prompt without an image."""
    return Rollouts.concat([policy.rollout(PROMPTS, 1, [1, 2, 3]), policy.demonstrate(PROMPTS[1:2])])


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    torch.set_num_threads(1)
    return {family: build(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


@pytest.fixture
def load(folders):
    """A policy of a family, fresh, for tests that change it; `family` may also be a folder."""

    def loader(family, **options) -> vlm.VisionLanguagePolicy:
        options = {"sampling": Sampling(temperature=0.7), "max_response_length": LENGTH, "logp_chunk": 4} | options
        return loaded(folders.get(family, family), **options)

    return loader


@pytest.fixture(scope="session", params=FAMILIES)
def shared(request, folders) -> tuple[vlm.VisionLanguagePolicy, Rollouts]:
    """A policy and its rollouts, for tests that only look."""
    options = {"sampling": Sampling(temperature=0.7), "max_response_length": LENGTH, "logp_chunk": 4}
    policy = loaded(folders[request.param], **options)
    return policy, mixed(policy)


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param
