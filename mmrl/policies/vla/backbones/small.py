"""A small backbone for laptops and tests: a small transformer over the instruction and one image token.

The image token comes from convolutions modulated by the instruction or, for images of a grid world, from attention over
its squares."""

from __future__ import annotations

import json
import logging
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
MAX_WORDS = 24  # words of a prompt that are read
MAPS, SUMS = 4, 2  # attention maps, and weighted sums of words, of `Board`
SQUARE_WIDTH = 32  # width of the embedding of a grid world's square
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SmallActionConfig:
    """Sizes of a `SmallBackbone`, as small_vla.json holds them."""

    words: tuple[str, ...]  # vocabulary of prompts; unknown words share the id 0
    bins: int = 256  # number of action tokens, whose ids follow the ids of words
    width: int = 128
    layers: int = 2
    heads: int = 4
    channels: tuple[int, ...] = (24, 48, 64)  # of the three convolutions, the first two with stride 2; (): no images
    normalise: bool = False  # instance norm before the prompt's modulation
    codes: tuple[int, ...] = ()  # grid worlds: number of values of each channel of a square's pixel; (): RGB images
    squares: int = 0  # squares along each side of a grid world


@dataclass(frozen=True)
class SmallObservation:
    """A preprocessed observation."""

    image: Tensor  # [3, height, width] uint8
    words: Tensor  # [word] int64


class SmallBackbone(Backbone):
    """A transformer over one image token and the words of the prompt.

    RGB images pass through three convolutions with coordinate channels (CoordConv, arXiv 1807.03247), modulated by the
    prompt (FiLM, arXiv 1709.07871). A spatial softmax of each channel (arXiv 1504.00702) gives the positions of which
    the image token is made. Without `channels` only words are read, for simulators without images.

    With `codes` an image shows a grid world: one pixel a square, whose channels encode the object there. `Board` reads
    image and words, and the transformer gets its output as the only token.

    With `normalise` (instance norm, arXiv 1607.08022) the network learns to locate several objects from fewer batches
    (`scripts/bench/tabletop.md`). Without it, outputs of the third convolution are so small before training that the
    softmax is flat. Names of parameters are those of saved models."""

    def __init__(self, config: SmallActionConfig) -> None:
        super().__init__()
        self.config = config
        self.warned: set[str] = set()  # unknown words of which the user was told
        # ids: 0 for unknown words, then the words, then the action tokens
        self.width, self.vocabulary = config.width, len(config.words) + 1 + config.bins
        self.embeddings = nn.Embedding(self.vocabulary, config.width)
        nn.init.normal_(self.embeddings.weight, std=config.width**-0.5)
        if config.codes:
            self.board = Board(config)
        elif config.channels:
            self._build_vision(*config.channels)
        # embeddings of the positions of words
        self.order = nn.Parameter(torch.randn(MAX_WORDS, config.width) * 0.02)
        self.blocks = nn.ModuleList(SmallBlock(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)

    def _build_vision(self, channels_1: int, channels_2: int, channels_3: int) -> None:
        """Builds three convolutions, each with a FiLM layer, and the layers behind the spatial softmax."""
        width = self.config.width
        self.films = nn.ModuleList(nn.Linear(width, 2 * n) for n in (channels_1, channels_2, channels_3))
        # inputs (the third with two coordinate channels), outputs, kernel size, stride
        sizes = [(3, channels_1, 5, 2), (channels_1, channels_2, 3, 2), (channels_2 + 2, channels_3, 3, 1)]
        self.convolutions = nn.ModuleList(nn.Conv2d(i, o, k, stride=s, padding=k // 2) for i, o, k, s in sizes)
        self.sharpness = nn.Parameter(torch.ones(channels_3))
        self.places = nn.Sequential(nn.Linear(2 * channels_3, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    @property
    def input_embeddings(self) -> nn.Module:
        return self.embeddings

    @property
    def output_weight(self) -> Tensor:
        return self.embeddings.weight

    def prepare(
        self, images: Sequence[NDArray[np.uint8]], texts: Sequence[str], state: NDArray[np.float32]
    ) -> list[SmallObservation]:
        """Tokenizes prompts and puts the images of several cameras side by side. Raises UserError for missing images, a
        grid world of another size, and codes out of range."""
        image = images[0] if len(images) == 1 else np.concatenate(images, 2)
        side = self.config.squares
        if self.config.codes and image.shape[1:3] != (side, side):
            raise UserError(
                f"this small network reads boards of {side} x {side} squares, but the simulator shows "
                f"{image.shape[1]} x {image.shape[2]}; choose boards of {side} x {side} squares in task.options, "
                "or a model.build that sets `squares` of SmallActionConfig to the size of yours"
            )
        for channel, num_codes in enumerate(self.config.codes):
            max_code = int(image[..., channel].max())
            if max_code >= num_codes:
                raise UserError(
                    f"this small network reads codes below {num_codes} in channel {channel} of an image, but the "
                    f"simulator's images hold {max_code}, as rendered images do; use the simulator's encoded images"
                )
        if self.config.channels and not self.config.codes and not image.size:
            raise UserError(
                "the simulator shows no images, but this small network reads them; build a network that does not, with "
                "model.build=mmrl.tasks.manipulation.tiny_model:build_blind (reads instructions) or :build_states "
                "(reads states)"
            )
        pixels = torch.from_numpy(rearrange(image, "n h w c -> n c h w").copy())
        return [SmallObservation(row, self._ids(text)) for row, text in zip(pixels, texts, strict=True)]

    def collate(self, rows: Sequence[SmallObservation], device: torch.device) -> dict[str, Tensor]:
        """Stacks images, and pads words with 0: images [n, 3, height, width], words and mask [n, word]."""
        words = nn.utils.rnn.pad_sequence([row.words for row in rows], batch_first=True)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(row.words) for row in rows], batch_first=True)
        batch = {"images": torch.stack([row.image for row in rows]), "words": words, "mask": mask}
        return {name: value.to(device) for name, value in batch.items()}

    def encode(self, inputs: dict[str, Tensor], *, every_layer: bool) -> SmallPrefix:
        """Encodes observations. The tokens of RGB images are one image token, then the words; without images, the
        words; for a grid world, a single token."""
        words, mask = self.embeddings(inputs["words"]), inputs["mask"].bool()
        if self.config.codes:
            board = self.board(inputs["images"], words * mask[..., None])[:, None]
            return SmallPrefix(self, board, torch.ones_like(mask[:, :1]), every_layer)
        text = words + self.order[: words.shape[1]]
        if not self.config.channels:
            return SmallPrefix(self, text, mask, every_layer)
        # The image comes first, so that the prompt's last token, a word, attends to it.
        tokens = torch.cat([self._image_token(inputs["images"], (words * mask[..., None]).sum(1))[:, None], text], 1)
        return SmallPrefix(self, tokens, F.pad(mask, (1, 0), value=True), every_layer)

    def _image_token(self, images: Tensor, prompts: Tensor) -> Tensor:
        """Returns image tokens [n, width]. images: [n, 3, height, width] uint8; prompts: sums of word embeddings, [n,
        width], which modulate the convolutions."""
        h = images.to(prompts) / 255 - 0.5
        for layer, (convolution, film) in enumerate(zip(self.convolutions, self.films, strict=True)):
            scale, shift = rearrange(film(prompts), "n (two c) -> two n c 1 1", two=2)
            h = convolution(torch.cat([h, coordinates(h)], 1) if layer == 2 else h)  # the last one reads coordinates
            h = (F.instance_norm(h) if self.config.normalise else h) * (1 + scale) + shift
            h = F.relu(h) if layer < 2 else h
        attention = (h.flatten(2) * self.sharpness[:, None]).softmax(-1)
        # the mean position of each channel's attention; x: row and column
        positions = torch.einsum("ncp,xp->ncx", attention, coordinates(h)[0].flatten(1))
        return self.places(positions.flatten(1))

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: value.contiguous() for name, value in state.items()}, folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(asdict(self.config), indent=2))

    def _ids(self, text: str) -> Tensor:
        """Tokenizes a prompt by words, [word] int64; unknown words are 0. Warns of each unknown word once."""
        words = text.replace("?", " ?").split()[:MAX_WORDS]
        vocabulary = {word: i + 1 for i, word in enumerate(self.config.words)}
        if unknown := [word for word in dict.fromkeys(words) if word not in vocabulary and word not in self.warned]:
            self.warned.update(unknown)
            _log.warning(
                "the small model does not know the words %s of the prompt %r and cannot tell them apart; it knows: %s. "
                "To add words, set model.build to a function that builds the model with your own (sims/README.md)",
                ", ".join(unknown),
                text,
                " ".join(self.config.words),
            )
        return torch.tensor([vocabulary.get(word, 0) for word in words])


class Board(nn.Module):
    """Encodes the image of a grid world and the instruction as one token.

    An MLP gets three inputs: MAPS attention maps over the squares that the instruction conditions, MAPS maps that do
    not depend on it, and MAPS numbers computed from the instruction alone. MAPS is small, so that the network hardly
    distinguishes objects that instructions never name.

    The embedding e of a square is the sum of one embedding for each of its codes. Queries q_m are linear in sums of
    word embeddings, and map_m = softmax over squares of q_m . e(square) / sqrt(SQUARE_WIDTH). So pairs of a color and a
    type of object that never occurred together in training are located, too. In each of the SUMS sums words are
    weighted by their position, so that the first object of an instruction differs from the second.
    """

    def __init__(self, config: SmallActionConfig) -> None:
        super().__init__()
        self.codes = config.codes
        width, size = config.width, MAPS * config.squares**2
        # The names of the parameters are those in saved models.
        # embeddings of the codes of a square, which are added up
        self.things = nn.ModuleList(nn.Embedding(n, SQUARE_WIDTH) for n in config.codes)
        # weight of the word at each position, in each of the SUMS weighted sums of words
        self.weights = nn.Parameter(1 + torch.randn(SUMS, MAX_WORDS) / 2)
        # from these sums: a query for each of the MAPS attention maps over the squares
        self.sought = nn.Linear(SUMS * width, MAPS * SQUARE_WIDTH)
        # from the embedding of a square: MAPS maps that do not depend on the instruction
        self.there = nn.Linear(SQUARE_WIDTH, MAPS)
        # from the sums of words: MAPS numbers that do not depend on the image
        self.heard = nn.Linear(SUMS * width, MAPS)
        # from the attention maps, the other maps and these numbers: the token
        self.layers = nn.Sequential(nn.Linear(2 * size + MAPS, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, codes: Tensor, words: Tensor) -> Tensor:
        """Returns tokens [n, width]. codes: images [n, channel, height, width] of integers; words: embeddings [n, word,
        width], 0 at padding."""
        # Scores are computed for every combination of codes (the table) and then looked up for each square.
        summary = torch.einsum("sp,npw->nsw", self.weights[:, : words.shape[1]], words).flatten(1)
        table = sum_of_codes([thing.get_parameter("weight") for thing in self.things])
        index = torch.zeros_like(codes[:, 0], dtype=torch.long)  # row of the table, in the order of `sum_of_codes`
        for channel, num_codes in enumerate(self.codes):
            index = index * num_codes + codes[:, channel].long()
        index = index.flatten(1)  # [n, square]
        queries = rearrange(self.sought(summary), "n (m e) -> n m e", m=MAPS)
        scores = torch.einsum("nme,ke->nkm", queries, table) * SQUARE_WIDTH**-0.5
        unconditioned = self.there(table).expand(len(codes), -1, -1)
        maps = torch.cat([scores, unconditioned], 2).gather(1, index[..., None].expand(-1, -1, 2 * MAPS))
        maps = torch.cat([maps[..., :MAPS].softmax(1), F.relu(maps[..., MAPS:])], 2)  # [n, square, map]
        return self.layers(torch.cat([maps.flatten(1), self.heard(summary)], 1))


def sum_of_codes(weights: Sequence[Tensor]) -> Tensor:
    """Returns the sum of embeddings for every combination of codes, [combination, e], the last channel varying fastest.
    weights: the embeddings of each channel, [code, e]."""
    table = weights[0]
    for channel_weights in weights[1:]:
        table = (table[:, None] + channel_weights[None]).flatten(0, 1)
    return table


class SmallPrefix:
    """An `mmrl.policies.vla.heads.head.EncodedPrefix` of a `SmallBackbone`, for n prompts."""

    def __init__(self, backbone: SmallBackbone, tokens: Tensor, mask: Tensor, every_layer: bool) -> None:
        """Encodes tokens, embeddings [n, t, width]. mask: [n, t] bool, False at padding; every_layer: whether `layers`
        also holds the inputs of all blocks, not only the last hidden states."""
        self.backbone, self.every_layer, self.mask = backbone, every_layer, mask
        self.block_inputs: list[Tensor] = []  # [n, t, width] of each block; later tokens attend to them
        h = tokens
        for block in backbone.blocks:
            self.block_inputs.append(h)
            h = block(h, h, rearrange(mask, "n s -> n 1 1 s"))
        self.hidden = backbone.norm(h)
        self.layers = (*self.block_inputs, self.hidden) if every_layer else (self.hidden,)
        # index of the last token: the first position at which the count of tokens is highest
        end = self.mask.long().cumsum(1).argmax(1)
        self.last = self.hidden[torch.arange(len(h), device=h.device), end]

    def extend(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Appends embeddings `tokens` [n, t, width], which attend to the prompt and to earlier tokens; may be called
        repeatedly. mask: [n, t], 0 at padding. Returns the last hidden states of these tokens, [n, t, width]."""
        t = tokens.shape[1]
        causal = torch.ones(t, t, dtype=torch.bool, device=tokens.device).tril()
        earlier = rearrange(self.mask, "n s -> n 1 1 s").expand(-1, 1, t, -1)
        attention_mask = torch.cat([earlier, causal.expand(len(tokens), 1, t, t)], -1)
        self.mask = torch.cat([self.mask, mask.bool()], 1)
        h, layers = tokens, []
        for i, block in enumerate(self.backbone.blocks):
            layers.append(h)
            self.block_inputs[i] = torch.cat([self.block_inputs[i], h], 1)
            h = block(h, self.block_inputs[i], attention_mask)
        out = self.backbone.norm(h)
        self.layers = (*layers, out) if self.every_layer else (out,)
        return out


class SmallBlock(nn.Module):
    """A transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, h: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        """Returns [n, t, width]. h: [n, t, width], which attends to context [n, s, width] where mask [n, 1, t or 1, s]
        is True."""
        q = rearrange(self.query(self.norms[0](h)), "n t (h d) -> n h t d", h=self.heads)
        k, v = rearrange(self.key_value(self.norms[0](context)), "n s (two h d) -> two n h s d", two=2, h=self.heads)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        h = h + self.out(rearrange(attended, "n h t d -> n t (h d)"))
        return h + self.mlp(self.norms[1](h))


def coordinates(h: Tensor) -> Tensor:
    """Returns the coordinates of the pixels of feature maps h [n, channel, height, width]: [n, 2, height, width], from
    -1 to 1 downwards and to the right."""
    n, _, height, width = h.shape
    down, right = (torch.linspace(-1, 1, size, device=h.device, dtype=h.dtype) for size in (height, width))
    return torch.stack(torch.meshgrid(down, right, indexing="ij")).expand(n, 2, height, width)


def create(folder: str | Path, config: SmallActionConfig, seed: int) -> None:
    """Saves a network with random weights of `seed` in `folder`, and leaves torch's global random state as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        backbone = SmallBackbone(config)
    backbone.save(Path(folder), backbone.state_dict())


def load(folder: Path) -> SmallBackbone:
    """Loads a network. Raises UserError if its config file does not fit `SmallActionConfig`."""
    tree: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    tree.pop("pixels", None)  # written by earlier versions, for a kind of network that was removed
    if tree.get("squares") and not tree.get("codes"):
        raise UserError(f"{folder}: networks that read squares of rendered images were removed; create the model again")
    try:
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in tree.items()}
        config = SmallActionConfig(**fields)
    except TypeError as error:
        raise UserError(f"{folder / CONFIG}: {error}") from None
    backbone = SmallBackbone(config)
    backbone.load_state_dict(load_file(folder / WEIGHTS))
    return backbone
