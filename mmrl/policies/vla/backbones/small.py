"""A small backbone for laptops and tests: convolutions that the instruction modulates, or a board that words look at,
and a small transformer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmrl.errors import UserError
from mmrl.policies.vla.backbones.backbone import Backbone

CONFIG, WEIGHTS = "small_vla.json", "model.safetensors"


@dataclass(frozen=True)
class SmallActionConfig:
    words: tuple[str, ...]  # of prompts; others are unknown
    bins: int = 256  # ids behind the words, for actions
    width: int = 128
    layers: int = 2
    heads: int = 4
    channels: tuple[int, ...] = (24, 48, 64)  # of the three convolutions; the first two halve the image; (): blind
    normalise: bool = False  # every channel over its image, before the prompt modulates it
    codes: tuple[int, ...] = ()  # how many values each channel of an image has, one pixel a square; (): it is drawn
    squares: int = 0  # along each side of an image of codes


@dataclass(frozen=True)
class SmallObservation:
    """One observation, as it is kept."""

    image: Tensor  # [3, height, width] uint8
    words: Tensor  # [word] int64


class SmallBackbone(Backbone):
    """Images through three convolutions with a coordinate grid (arXiv 1807.03247), scaled and shifted by the prompt
    (FiLM, arXiv 1709.07871); where each channel is strongest (spatial softmax, arXiv 1504.00702) is one token, which a
    transformer reads with the words. Without channels it reads words only, for simulators that show no images.

    With codes, an image has one pixel a square, whose channels say what is there; see `Board`. The transformer then
    gets one token, the board as the words see it.

    Normalised (arXiv 1607.08022), it finds several things at once after fewer batches (`scripts/bench/tabletop.md`):
    otherwise the third convolution's outputs begin so small that no place stands out."""

    def __init__(self, config: SmallActionConfig) -> None:
        super().__init__()
        self.config = config
        self.width, self.vocabulary = config.width, len(config.words) + 1 + config.bins
        self.embeddings = nn.Embedding(self.vocabulary, config.width)
        nn.init.normal_(self.embeddings.weight, std=config.width**-0.5)
        if config.codes:
            self.board = Board(config)
        elif config.channels:
            self._see(*config.channels)
        self.order = nn.Parameter(torch.randn(MAX_WORDS, config.width) * 0.02)
        self.blocks = nn.ModuleList(SmallBlock(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)

    def _see(self, a: int, b: int, c: int) -> None:
        width = self.config.width
        self.films = nn.ModuleList(nn.Linear(width, 2 * n) for n in (a, b, c))
        sizes = [(3, a, 5, 2), (a, b, 3, 2), (b + 2, c, 3, 1)]
        self.convolutions = nn.ModuleList(nn.Conv2d(i, o, k, stride=s, padding=k // 2) for i, o, k, s in sizes)
        self.sharpness = nn.Parameter(torch.ones(c))
        self.places = nn.Sequential(nn.Linear(2 * c, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    @property
    def input_embeddings(self) -> nn.Module:
        return self.embeddings

    @property
    def output_weight(self) -> Tensor:
        return self.embeddings.weight

    def prepare(
        self, images: Sequence[NDArray[np.uint8]], texts: Sequence[str], state: NDArray[np.float32]
    ) -> list[SmallObservation]:
        """Unknown words become one word, and images stand side by side. Raises UserError where there are none for
        convolutions, for another size than that of the board, and for codes that are not known."""
        board = images[0] if len(images) == 1 else np.concatenate(images, 2)
        side = self.config.squares
        if self.config.codes and board.shape[1:3] != (side, side):
            raise UserError(
                f"this small network looks at boards of {side} x {side} squares, but the simulator shows "
                f"{board.shape[1]} x {board.shape[2]}"
            )
        for channel, count in enumerate(self.config.codes):
            if (most := int(board[..., channel].max())) >= count:
                raise UserError(
                    f"this small network knows codes below {count} in channel {channel} of an image, but the "
                    f"simulator shows {most}, as if it were drawn"
                )
        if self.config.channels and not self.config.codes and not board.size:
            raise UserError("the simulator shows no images, but this small network looks at them; make a blind one")
        pixels = torch.from_numpy(rearrange(board, "n h w c -> n c h w").copy())
        return [SmallObservation(image, self._ids(text)) for image, text in zip(pixels, texts, strict=True)]

    def collate(self, rows: Sequence[SmallObservation], device: torch.device) -> dict[str, Tensor]:
        words = nn.utils.rnn.pad_sequence([row.words for row in rows], batch_first=True)
        known = nn.utils.rnn.pad_sequence([torch.ones_like(row.words) for row in rows], batch_first=True)
        given = {"images": torch.stack([row.image for row in rows]), "words": words, "known": known}
        return {name: value.to(device) for name, value in given.items()}

    def read(self, inputs: dict[str, Tensor], *, every_layer: bool) -> SmallReading:
        words, known = self.embeddings(inputs["words"]), inputs["known"].bool()
        if self.config.codes:
            board = self.board(inputs["images"], words * known[..., None])[:, None]
            return SmallReading(self, board, torch.ones_like(known[:, :1]), every_layer)
        said = words + self.order[: words.shape[1]]
        if not self.config.channels:
            return SmallReading(self, said, known, every_layer)
        # The image comes first, so that the last token of a prompt is a word and has seen it.
        tokens = torch.cat([self._seen(inputs["images"], (words * known[..., None]).sum(1))[:, None], said], 1)
        return SmallReading(self, tokens, F.pad(known, (1, 0), value=True), every_layer)

    def _seen(self, images: Tensor, told: Tensor) -> Tensor:
        """images [n, 3, height, width], prompts [n, width] -> [n, width]"""
        h = images.to(told) / 255 - 0.5
        for layer, (convolution, film) in enumerate(zip(self.convolutions, self.films, strict=True)):
            scale, shift = rearrange(film(told), "n (two c) -> two n c 1 1", two=2)
            h = convolution(torch.cat([h, coordinates(h)], 1) if layer == 2 else h)
            h = (F.instance_norm(h) if self.config.normalise else h) * (1 + scale) + shift
            h = F.relu(h) if layer < 2 else h
        where = (h.flatten(2) * self.sharpness[:, None]).softmax(-1)
        place = torch.einsum("ncp,xp->ncx", where, coordinates(h)[0].flatten(1))
        return self.places(place.flatten(1))

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: value.contiguous() for name, value in state.items()}, folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(asdict(self.config), indent=2))

    def _ids(self, text: str) -> Tensor:
        words = text.replace("?", " ?").split()[:MAX_WORDS]
        known = {word: i + 1 for i, word in enumerate(self.config.words)}
        return torch.tensor([known.get(word, 0) for word in words])


MAX_WORDS = 24


class Board(nn.Module):
    """What stands where, as the words see it: MAPS maps of what the words look for, as many of what is there whatever
    they say, and as many numbers of what they say, which a perceptron reads. They are few, so that what is never asked
    for is hardly told from what is.

    A square is the sum of an embedding for each of its codes, and what is looked for is linear in sums of the words:
    map_m = softmax over squares of q_m . e(square) / sqrt(THING). So a colour and a kind are found together which were
    never named together: what fits best is found, however well it fits. In each of SUMS sums words weigh by their
    place, so that the first thing that is named is told from the second.
    """

    def __init__(self, config: SmallActionConfig) -> None:
        super().__init__()
        self.codes = config.codes
        width, size = config.width, MAPS * config.squares**2
        self.things = nn.ModuleList(nn.Embedding(n, THING) for n in config.codes)
        self.weights = nn.Parameter(1 + torch.randn(SUMS, MAX_WORDS) / 2)
        self.sought = nn.Linear(SUMS * width, MAPS * THING)
        self.there = nn.Linear(THING, MAPS)
        self.heard = nn.Linear(SUMS * width, MAPS)
        self.layers = nn.Sequential(nn.Linear(2 * size + MAPS, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, codes: Tensor, words: Tensor) -> Tensor:
        """codes [n, channel, height, width] of whole numbers, words [n, word, width] -> [n, width]"""
        told = torch.einsum("sp,npw->nsw", self.weights[:, : words.shape[1]], words).flatten(1)
        table = sum_of_codes([thing.get_parameter("weight") for thing in self.things])
        index = torch.zeros_like(codes[:, 0], dtype=torch.long)
        for channel, count in enumerate(self.codes):
            index = index * count + codes[:, channel].long()
        index = index.flatten(1)  # [n, square]
        sought = rearrange(self.sought(told), "n (m e) -> n m e", m=MAPS)
        found = torch.einsum("nme,ke->nkm", sought, table) * THING**-0.5  # of every combination
        there = self.there(table).expand(len(codes), -1, -1)
        maps = torch.cat([found, there], 2).gather(1, index[..., None].expand(-1, -1, 2 * MAPS))
        maps = torch.cat([maps[..., :MAPS].softmax(1), F.relu(maps[..., MAPS:])], 2)  # [n, square, map]
        return self.layers(torch.cat([maps.flatten(1), self.heard(told)], 1))


MAPS, THING, SUMS = 4, 32, 2  # maps of a board, of either kind; numbers of a thing; sums of words


def sum_of_codes(weights: Sequence[Tensor]) -> Tensor:
    """One embedding [count, e] for each channel -> their sums [product of counts, e], the last channel the fastest."""
    table = weights[0]
    for more in weights[1:]:
        table = (table[:, None] + more[None]).flatten(0, 1)
    return table


class SmallReading:
    """What a `SmallBackbone` made of n prompts, to be continued; see `mmrl.policies.vla.heads.head.Reading`."""

    def __init__(self, backbone: SmallBackbone, tokens: Tensor, mask: Tensor, every_layer: bool) -> None:
        """tokens [n, t, width], mask [n, t]"""
        self.backbone, self.every_layer, self.mask = backbone, every_layer, mask
        self.before: list[Tensor] = []  # what came into each block
        h = tokens
        for block in backbone.blocks:
            self.before.append(h)
            h = block(h, h, rearrange(mask, "n s -> n 1 1 s"))
        self.hidden = backbone.norm(h)
        self.layers = (*self.before, self.hidden) if every_layer else (self.hidden,)
        end = self.mask.long().cumsum(1).argmax(1)
        self.last = self.hidden[torch.arange(len(h), device=h.device), end]

    def extend(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Tokens [n, t, width] that see the prompt and what came before them; may be called again to go on."""
        t = tokens.shape[1]
        causal = torch.ones(t, t, dtype=torch.bool, device=tokens.device).tril()
        earlier = rearrange(self.mask, "n s -> n 1 1 s").expand(-1, 1, t, -1)
        seen = torch.cat([earlier, causal.expand(len(tokens), 1, t, t)], -1)
        self.mask = torch.cat([self.mask, mask.bool()], 1)
        h, layers = tokens, []
        for i, block in enumerate(self.backbone.blocks):
            layers.append(h)
            self.before[i] = torch.cat([self.before[i], h], 1)
            h = block(h, self.before[i], seen)
        out = self.backbone.norm(h)
        self.layers = (*layers, out) if self.every_layer else (out,)
        return out


class SmallBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, h: Tensor, context: Tensor, seen: Tensor) -> Tensor:
        """h [n, t, width] looks at context [n, s, width] where seen [n, 1, t or 1, s]."""
        q = rearrange(self.query(self.norms[0](h)), "n t (h d) -> n h t d", h=self.heads)
        k, v = rearrange(self.key_value(self.norms[0](context)), "n s (two h d) -> two n h s d", two=2, h=self.heads)
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        h = h + self.out(rearrange(a, "n h t d -> n t (h d)"))
        return h + self.mlp(self.norms[1](h))


def coordinates(h: Tensor) -> Tensor:
    """[n, 2, height, width]: where each pixel is, -1 to 1 down and to the right."""
    n, _, height, width = h.shape
    down, right = (torch.linspace(-1, 1, size, device=h.device, dtype=h.dtype) for size in (height, width))
    return torch.stack(torch.meshgrid(down, right, indexing="ij")).expand(n, 2, height, width)


def create(folder: str | Path, config: SmallActionConfig, seed: int) -> None:
    """Random weights, the same for the same seed, into `folder`; torch's global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        backbone = SmallBackbone(config)
    backbone.save(Path(folder), backbone.state_dict())


def load(folder: Path) -> SmallBackbone:
    """Raises UserError for a description that is not one of `SmallActionConfig`."""
    told: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    told.pop("pixels", None)  # earlier versions wrote it beside every network, and one kind, which is gone, read it
    if told.get("squares") and not told.get("codes"):
        raise UserError(f"{folder}: networks that look at squares of a drawn image are gone; make the base again")
    try:
        given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in told.items()}
        config = SmallActionConfig(**given)
    except TypeError as error:
        raise UserError(f"{folder / CONFIG}: {error}") from None
    backbone = SmallBackbone(config)
    backbone.load_state_dict(load_file(folder / WEIGHTS))
    return backbone
