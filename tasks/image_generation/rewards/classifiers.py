"""Classifiers of small images, trained in a second or two and cached, so that the next job starts with them at once.

A cached file belongs to the images, to the code of this module and to the version of torch; with another of these the
classifier is trained again. How many threads trained it shows in the last digits of its weights only.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmrl.runtime.files import user_cache

SIZE = 8  # pixels a side
STEPS = 400
log = logging.getLogger(__name__)


def trained(images: Tensor, labels: Tensor, *, convolutions: bool) -> nn.Module:
    """Returns a trained classifier of [image, 1, 8, 8] of 0 to 1, logits [image, 10]: a perceptron or a convolutional
    network.

    It learns with noise of a standard deviation up to 0.2, for what a generator draws is never clean.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(convolutions))
        network = _convolutions() if convolutions else _perceptron()
        folder = user_cache("classifiers", "MMRL_CLASSIFIER_CACHE")
        file = folder / f"{_digest(images, labels, convolutions)}.safetensors"
        if not _recall(network, file):
            _train(network, images, labels, rate=3e-3 if convolutions else 1e-2)
            _remember(network, file)
    return network.eval().requires_grad_(False)


def _train(network: nn.Module, images: Tensor, labels: Tensor, rate: float) -> None:
    """Trains a classifier on images [n, 1, SIZE, SIZE] with added noise and labels [n]. rate: peak learning rate."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, STEPS)
    for _ in range(STEPS):
        batch = torch.randint(len(images), (64,))
        noise = 0.2 * torch.rand(len(batch), 1, 1, 1) * torch.randn(len(batch), 1, SIZE, SIZE)
        loss = F.cross_entropy(network((images[batch] + noise).clamp(0, 1)), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(SIZE * SIZE, 512), nn.ReLU(), nn.Linear(512, 10))


def _convolutions() -> nn.Module:
    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]

    return nn.Sequential(
        *block(1, 16), *block(16, 32), nn.MaxPool2d(2), *block(32, 32), nn.Flatten(), nn.Linear(512, 10)
    )


# --- files ---


def _digest(images: Tensor, labels: Tensor, convolutions: bool) -> str:
    """Returns a key for the cache of a trained classifier: of its data, this file and torch's version."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    digest.update(f"{torch.__version__} {convolutions}".encode())
    for values in (images, labels):
        digest.update(values.contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


def _recall(network: nn.Module, file: Path) -> bool:
    """Loads the cached weights into the network; returns whether there were any."""
    if not file.is_file():
        return False
    try:
        network.load_state_dict(load_file(file))
    except (OSError, SafetensorError, RuntimeError) as error:
        log.info("%s has no classifier, which is trained again: %s", file, error)
        return False
    return True


def _remember(network: nn.Module, file: Path) -> None:
    """Caches the weights. If the folder cannot be written, the next start trains again."""
    draft = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(network.state_dict(), draft)
        draft.replace(file)
    except (OSError, SafetensorError) as error:
        log.info("%s cannot be written, so the classifier is trained again at the next start: %s", file, error)
