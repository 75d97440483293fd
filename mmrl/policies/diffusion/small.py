"""Small flow models of mmrl's own for CPUs and tests: prompts of a fixed vocabulary, and pixels as latents."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmrl.errors import UserError
from mmrl.policies.diffusion.family import Condition, ConditionInputs, ModelNotes, Resolution, Shape
from mmrl.policies.embeddings import sinusoids
from mmrl.policies.models import NetworkCall
from mmrl.samplers.settings import Space
from mmrl.samplers.sigmas import Grid, shift_towards_noise, shifted

CONFIG, WEIGHTS = "small_diffusion.json", "model.safetensors"


@dataclass(frozen=True)
class SmallDiffusionConfig:
    """The configuration of a small flow model, saved as small_diffusion.json."""

    words: tuple[str, ...]  # the vocabulary of prompts
    channels: int = 1
    size: int = 8  # side of an image, in pixels
    network: Literal["mlp", "modulated_mlp", "transformer"] = "mlp"
    width: int = 256
    depth: int = 3
    heads: int = 4
    patch: int = 2  # side of a patch of the transformer, in pixels
    max_words: int = 16
    ordered: bool = False  # the MLPs get the embeddings of words in order, not only their sum
    predicts: Literal["velocity", "data"] = "velocity"  # output of the last layer; data is converted to a velocity
    shift: float = 1.0  # shift of the noise levels towards noise, as in Stable Diffusion 3; 1: none


class SmallMLP(nn.Module):
    """A residual MLP over all pixels, noise level and prompt; the prompt is the sum of its word embeddings, or their
    concatenation if `ordered`."""

    def __init__(self, config: SmallDiffusionConfig) -> None:
        super().__init__()
        pixels = config.channels * config.size**2
        # ordered: embeddings of words are concatenated, else added up
        self.ordered, self.predicts_data = config.ordered, config.predicts == "data"
        # 32: the size of a word's embedding, and of that of the noise level; word 0 is padding
        self.words = nn.Embedding(len(config.words) + 1, 32, padding_idx=0)
        self.enter = nn.Linear(pixels + 32 + 32 * (config.max_words if config.ordered else 1), config.width)
        self.blocks = nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(config.depth - 1))
        self.leave = nn.Linear(config.width, pixels)

    def forward(self, x: Tensor, time: Tensor, words: Tensor) -> Tensor:
        """Returns the velocity, shaped like x.

        x: noisy pixels, [n, channel, height, width]; time: noise level, [n], in [0, 1]; words: ids, [n, word], 0 for
        padding.
        """
        text = self.words(words)
        text = text.flatten(1) if self.ordered else text.sum(1)
        inputs = torch.cat([x.flatten(1), sinusoids(time, 32).to(x), text], 1)
        h = F.silu(self.enter(inputs))
        for block in self.blocks:
            h = h + F.silu(block(h))
        output = self.leave(h).view_as(x)
        return velocity(output, x, time) if self.predicts_data else output


class Modulated(nn.Module):
    """A residual MLP over all pixels whose blocks are scaled and shifted by the condition (adaptive layer norm, arXiv
    2212.09748), so that a prompt can switch features off."""

    def __init__(self, pixels: int, condition_width: int, width: int, depth: int) -> None:
        super().__init__()
        self.enter = nn.Linear(pixels, width)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(depth)
        )
        # one for each block, and one for the output layer
        self.modulations = nn.ModuleList(nn.Linear(condition_width, 2 * width) for _ in range(depth + 1))
        self.leave = nn.Linear(width, pixels)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)

    def run_blocks(self, x: Tensor, condition: Tensor) -> Tensor:
        """Maps x [n, channel, height, width] and condition [n, condition width] to an output shaped like x."""
        h = self.enter(x.flatten(1))
        # strict=False: the last modulation is not for a block but for the output
        for block, modulation in zip(self.blocks, self.modulations, strict=False):
            h = h + block(self.modulated(h, modulation(condition)))
        return self.leave(self.modulated(h, self.modulations[-1](condition))).view_as(x)

    def modulated(self, h: Tensor, modulation: Tensor) -> Tensor:
        """Normalises h [n, width], then scales and shifts it by the two halves of `modulation` [n, 2 x width]."""
        scale, shift = modulation.chunk(2, 1)
        return self.norm(h) * (1 + scale) + shift


CONDITION_WIDTH = 128  # size of the embedding of noise level and prompt


def condition_mlp(prompt_width: int) -> nn.Sequential:
    """Builds the MLP from the embeddings of noise level (32) and prompt (prompt_width), concatenated, to a condition of
    size CONDITION_WIDTH."""
    return nn.Sequential(
        nn.Linear(32 + prompt_width, CONDITION_WIDTH), nn.SiLU(), nn.Linear(CONDITION_WIDTH, CONDITION_WIDTH), nn.SiLU()
    )


class ModulatedMLP(Modulated):
    """A `Modulated` MLP, conditioned on noise level and prompt; the prompt is embedded as in `SmallMLP`."""

    def __init__(self, config: SmallDiffusionConfig) -> None:
        super().__init__(config.channels * config.size**2, CONDITION_WIDTH, config.width, config.depth)
        self.ordered, self.predicts_data = config.ordered, config.predicts == "data"
        self.words = nn.Embedding(len(config.words) + 1, CONDITION_WIDTH, padding_idx=0)
        self.condition = condition_mlp(CONDITION_WIDTH * (config.max_words if config.ordered else 1))

    def forward(self, x: Tensor, time: Tensor, words: Tensor) -> Tensor:
        """Returns the velocity, shaped like x.

        x: noisy pixels, [n, channel, height, width]; time: noise level, [n], in [0, 1]; words: ids, [n, word], 0 for
        padding.
        """
        text = self.words(words)
        text = text.flatten(1) if self.ordered else text.sum(1)
        output = self.run_blocks(x, self.condition(torch.cat([sinusoids(time, 32).to(x), text], 1)))
        return velocity(output, x, time) if self.predicts_data else output


class SmallTransformer(nn.Module):
    """A small DiT (arXiv 2212.09748): a transformer over words and patches, modulated by the noise level."""

    def __init__(self, config: SmallDiffusionConfig) -> None:
        super().__init__()
        d, p = config.width, config.patch
        self.predicts_data = config.predicts == "data"
        self.patch, self.side = p, config.size // p
        self.words = nn.Embedding(len(config.words) + 1, d, padding_idx=0)
        # places: embeddings of the positions of words and of patches
        self.word_places = nn.Parameter(torch.randn(config.max_words, d) * 0.02)
        self.patches = nn.Linear(config.channels * p**2, d)
        self.patch_places = nn.Parameter(torch.randn(self.side**2, d) * 0.02)
        self.time = nn.Sequential(nn.Linear(64, d), nn.SiLU(), nn.Linear(d, d))
        self.blocks = nn.ModuleList(Block(d, config.heads) for _ in range(config.depth))
        self.norm = nn.LayerNorm(d, elementwise_affine=False)
        self.leave = nn.Linear(d, config.channels * p**2)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)

    def forward(self, x: Tensor, time: Tensor, words: Tensor) -> Tensor:
        """Returns the velocity, shaped like x; see `SmallMLP.forward` for the arguments."""
        p = self.patch
        text = self.words(words) + self.word_places
        patches = self.patches(rearrange(x, "n c (h p) (w q) -> n (h w) (c p q)", p=p, q=p)) + self.patch_places
        h = torch.cat([text, patches], 1)
        level = self.time(sinusoids(time, 64).to(x))
        for block in self.blocks:
            h = block(h, level)
        out = self.leave(self.norm(h[:, words.shape[1] :]))
        output = rearrange(out, "n (h w) (c p q) -> n c (h p) (w q)", h=self.side, p=p, q=p)
        return velocity(output, x, time) if self.predicts_data else output


class Block(nn.Module):
    """A transformer block with adaptive layer norm (DiT)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.modulation = nn.Linear(width, 6 * width)  # shift, scale and gate of attention and of the MLP
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, h: Tensor, level: Tensor) -> Tensor:
        """Applies attention and MLP to h [n, token, width], each scaled, shifted and gated by the embedding of the
        noise level [n, width]. Gates are initialised to 1, so that a new network is an ordinary transformer."""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(F.silu(level))[:, None].chunk(6, -1)
        a = self.norms[0](h) * (1 + scale_a) + shift_a
        q, k, v = rearrange(self.qkv(a), "n t (three h d) -> three n h t d", three=3, h=self.heads)
        a = rearrange(F.scaled_dot_product_attention(q, k, v), "n h t d -> n t (h d)")
        h = h + (1 + gate_a) * self.out(a)
        return h + (1 + gate_m) * self.mlp(self.norms[1](h) * (1 + scale_m) + shift_m)


class SmallFamily:
    """The family of small networks; implements `Family`. Latents are pixels in [-1, 1]; word embeddings are part of the
    network."""

    space: Space = "velocity"
    norm_patch: int | None = None
    notes = ModelNotes()

    def __init__(self, config: SmallDiffusionConfig, module: nn.Module) -> None:
        self.config, self.module = config, module.eval()
        self._ids = {word: i + 1 for i, word in enumerate(config.words)}

    def latent_shape(self, resolution: Resolution, frames: int | None = None) -> Shape:
        """Returns [channel, height, width] of latents, which are the pixels. Raises UserError for another resolution
        than the model's, and for frames."""
        if resolution not in (None, self.config.size, (self.config.size,) * 2):
            size = self.config.size
            raise UserError(
                f"denoising.resolution={resolution}, but the model at model.path generates {size} x {size} pixels; "
                "leave it out"
            )
        if frames is not None:
            raise UserError(f"denoising.frames={frames}, but the model at model.path generates images; leave it out")
        return self.config.channels, self.config.size, self.config.size

    def grid(self, steps: int, shape: Shape) -> Grid:
        sigmas = shifted(steps, self.config.shift)
        return Grid(sigmas, sigmas[:-1])

    def levels(self, uniform: Tensor) -> tuple[Tensor, Tensor]:
        sigma = shift_towards_noise(uniform, self.config.shift)
        return sigma, sigma

    def encode(self, inputs: Sequence[ConditionInputs], shape: Shape = ()) -> list[Condition]:
        """Returns one condition per input: the ids of its words. shape: not used. Raises UserError for images, and for
        words that the model does not know."""
        with_image = next((item for item in inputs if item.images), None)
        if with_image is not None:
            raise UserError(
                f"prompt {with_image.text!r} has an image, but the model at model.path reads only words; take the "
                "image out"
            )
        return [{"words": self._encode(item.text)} for item in inputs]

    def truncated_tokens(self, text: str) -> int:
        return 0  # `encode` raises UserError for longer prompts

    def readable(self, text: str) -> str:
        """Returns the words of a text that are in the vocabulary, at most max_words of them."""
        words = [word for word in text.lower().replace(",", " ").split() if word in self._ids]
        return " ".join(words[: self.config.max_words])

    def _encode(self, text: str) -> Tensor:
        """Returns the ids of the words of a prompt, padded with 0, [max_words]. Raises UserError for unknown words and
        too many words."""
        words = text.lower().replace(",", " ").split()
        unknown = [word for word in words if word not in self._ids]
        if unknown:
            raise UserError(
                f"prompt {text!r}: the model at model.path does not know the word {unknown[0]!r}; it knows "
                f"{' '.join(self._ids)}"
            )
        if len(words) > self.config.max_words:
            raise UserError(
                f"prompt {text!r} has {len(words)} words, more than the {self.config.max_words} that the model at "
                "model.path reads; shorten it"
            )
        ids = [self._ids[word] for word in words]
        return torch.tensor(ids + [0] * (self.config.max_words - len(ids)))

    def predict(
        self, model: NetworkCall, x: Tensor, time: Tensor, conditions: Sequence[Condition], guidance: float | None
    ) -> Tensor:
        """Predicts the velocity of x [n, channel, height, width]; see `Family.predict`. guidance: not used."""
        words = torch.stack([c["words"] for c in conditions]).to(x.device)
        dtype = next(self.module.parameters()).dtype
        return model(x.to(dtype), time.to(x), words).float()

    def decode(self, latents: Tensor) -> Tensor:
        return latents / 2 + 0.5

    def decode_with_gradient(self, latents: Tensor) -> Tensor:
        return self.decode(latents)

    def to_latents(self, pixels: Tensor) -> Tensor:
        return pixels * 2 - 1

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        write(folder, self.config, state)


def velocity(data: Tensor, x: Tensor, sigma: Tensor) -> Tensor:
    """Converts predicted data [n, ...] to a velocity, (x - data) / sigma, with sigma [n] clamped to at least 0.05.

    Data is easier to predict than velocity: images lie on a low-dimensional manifold, noise does not (arXiv
    2511.13720).
    """
    return (x - data) / sigma.clamp(min=0.05).view(-1, *[1] * (x.dim() - 1))


def network(config: SmallDiffusionConfig) -> nn.Module:
    """Builds the network that `config.network` names, with random weights."""
    classes = {"mlp": SmallMLP, "modulated_mlp": ModulatedMLP, "transformer": SmallTransformer}
    return classes[config.network](config)


def create(folder: Path, config: SmallDiffusionConfig, seed: int) -> None:
    """Writes a model with random weights into `folder`. seed: determines the weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        write(folder, config, network(config).state_dict())


def write(folder: Path, config: SmallDiffusionConfig, state: dict[str, Tensor]) -> None:
    """Saves weights and configuration. state: the state dict of the network."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in state.items()}, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(asdict(config), indent=2))


def load(folder: Path, *, dtype: str) -> SmallFamily:
    """Loads a small model from its folder. dtype: the number format of the weights, such as "float32"."""
    config = SmallDiffusionConfig(**json.loads((folder / CONFIG).read_text()))
    module = network(config)
    module.load_state_dict(load_file(folder / WEIGHTS))
    return SmallFamily(config, module.to(getattr(torch, dtype)))
