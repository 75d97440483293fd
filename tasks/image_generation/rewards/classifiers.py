"""Classifiers of small images, which are trained in a second or two, and cached on disk.

The key of a cached file is made of the images, the code of this module and the version of torch. The number of threads
is not part of it, since it changes only the last digits of the weights.
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

SIZE = 8  # pixels along a side of an image
STEPS = 400  # training steps
log = logging.getLogger(__name__)


def trained_classifier(images: Tensor, labels: Tensor, *, convolutions: bool) -> nn.Module:
    """Trains a classifier, or reads it from the cache. It maps images [image, 1, 8, 8], 0 to 1, to logits [image, 10].

    images, labels: the training images [image, 1, 8, 8] and their digits [image]. convolutions: a convolutional
    network, else a perceptron. Noise with a standard deviation up to 0.2 is added, since generated images are never
    clean.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(convolutions))
        network = _convolutions() if convolutions else _perceptron()
        folder = user_cache("classifiers", "MMRL_CLASSIFIER_CACHE")
        file = folder / f"{_digest(images, labels, convolutions)}.safetensors"
        if not _load_cached(network, file):
            _train(network, images, labels, learning_rate=3e-3 if convolutions else 1e-2)
            _save_cached(network, file)
    return network.eval().requires_grad_(False)


def _train(network: nn.Module, images: Tensor, labels: Tensor, learning_rate: float) -> None:
    """Trains a classifier in place on noisy images [image, 1, SIZE, SIZE] and labels [image]. learning_rate: the peak
    of the schedule."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, STEPS)
    for _ in range(STEPS):
        batch = torch.randint(len(images), (64,))
        noise = 0.2 * torch.rand(len(batch), 1, 1, 1) * torch.randn(len(batch), 1, SIZE, SIZE)
        loss = F.cross_entropy(network((images[batch] + noise).clamp(0, 1)), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def _perceptron() -> nn.Module:
    """Builds a perceptron from images [image, 1, SIZE, SIZE] to logits [image, 10]."""
    return nn.Sequential(nn.Flatten(), nn.Linear(SIZE * SIZE, 512), nn.ReLU(), nn.Linear(512, 10))


def _convolutions() -> nn.Module:
    """Builds a convolutional network from images [image, 1, SIZE, SIZE] to logits [image, 10]."""

    def block(in_channels: int, out_channels: int) -> list[nn.Module]:
        """Returns a convolution that leaves the image size unchanged, with its activation."""
        return [nn.Conv2d(in_channels, out_channels, 3, padding=1), nn.ReLU()]

    return nn.Sequential(
        *block(1, 16), *block(16, 32), nn.MaxPool2d(2), *block(32, 32), nn.Flatten(), nn.Linear(512, 10)
    )


# --- files ---


def _digest(images: Tensor, labels: Tensor, convolutions: bool) -> str:
    """Returns the key of a classifier in the cache: a digest of its training data, this file and torch's version."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    digest.update(f"{torch.__version__} {convolutions}".encode())
    for values in (images, labels):
        digest.update(values.contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


def _load_cached(network: nn.Module, file: Path) -> bool:
    """Loads cached weights into the network. Returns False if there are none that can be read."""
    if not file.is_file():
        return False
    try:
        network.load_state_dict(load_file(file))
    except (OSError, SafetensorError, RuntimeError) as error:
        log.info("cannot load the cached classifier %s, so it is trained again: %s", file, error)
        return False
    return True


def _save_cached(network: nn.Module, file: Path) -> None:
    """Writes the weights to the cache. If its folder cannot be written, the next start trains again."""
    draft = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(network.state_dict(), draft)
        draft.replace(file)
    except (OSError, SafetensorError) as error:
        log.info("%s cannot be written, so the classifier is trained again at the next start: %s", file, error)
