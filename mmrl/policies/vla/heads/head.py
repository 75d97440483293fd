"""From what the backbone read to a chunk of actions, and back to how likely that chunk was.

A head is asked for three things: `act` draws a chunk, `score` says how likely a given one is (the same code path, so
that the ratio is exactly 1 before the first update), `teach` makes of demonstrated actions what `score` takes.
What was chosen is a dictionary of tensors [n, ...] of fixed shapes, "actions" [n, chunk, action] among them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from einops import rearrange, reduce, repeat
from torch import Tensor, nn

from mmrl.errors import UserError
from mmrl.generation.sampling import draw
from mmrl.kernels import hidden_logprob
from mmrl.policies.vla.heads.codec import ActionCodec
from mmrl.policies.vla.heads.layers import BridgeBlock
from mmrl.policies.vla.settings import Actions, BridgeActions, LaplaceActions, Level, RegressionActions, TokenActions

Chosen = dict[str, Tensor]
CLIP = 1e-6
EXTRA = "extras."  # begins the names of what only some heads know of decisions; see `Replay.extras`


class Reading(Protocol):
    """What a backbone made of n prompts."""

    hidden: Tensor  # [n, token, width], the last layer
    mask: Tensor  # [n, token], 1 where there is a token
    last: Tensor  # [n, width], of each prompt's last token
    layers: tuple[Tensor, ...]  # of every layer [n, token, width], of what was read last

    def extend(self, tokens: Tensor, mask: Tensor) -> Tensor: ...


class JointReading(Reading, Protocol):
    """A reading that does not end where the prompt ends; see
    `mmrl.policies.vla.backbones.openvla.BidirectionalPrefix`."""

    def together(self, tokens: Tensor) -> Tensor: ...


class TokenBackbone(Protocol):
    """What a head with tokens needs of a backbone, see `mmrl.policies.vla.backbones.backbone.Backbone`."""

    width: int
    vocabulary: int

    @property
    def input_embeddings(self) -> nn.Module: ...

    @property
    def output_weight(self) -> Tensor: ...


@dataclass(frozen=True)
class ActionSampling:
    """How the chunks of n observations are drawn."""

    seeds: Sequence[int]  # n, each of one chunk's own randomness
    temperature: float = 1.0  # 0: the likeliest actions
    training: bool = True  # False leaves out what only serves to be scored, and may take more care
    groups: Sequence[int] = ()  # n, the seed of the group that each belongs to; for what a whole group shares
    step: int = 0  # finished training steps


class Head(nn.Module):
    """Turns readings into chunks of `shape` [chunk, action].

    `every_layer`: whether it needs all layers of the backbone. `context_only`: whether it needs nothing but the
    prompt's last layer, so that a frozen backbone is asked once for an observation. `reasons`: whether it draws latents
    before a chunk, which `reasoning_steps` counts. `new_parts`: beginnings of names of parameters that a saved head may
    lack, because training goes on with more than it began with, or because they lie in files of their own. `base`: the
    head that it is built around and that is not trained, if it is one.
    """

    every_layer = False
    context_only = False
    reasons = False
    new_parts: tuple[str, ...] = ()

    def __init__(self, action: Actions, action_dim: int, state_dim: int) -> None:
        """state_dim: numbers of the robot's state; `self.state_dim` is 0 where it is not an input."""
        super().__init__()
        self.base: Head | None = None
        self.shape = (action.chunk, action_dim)
        self.state_dim = state_dim if action.proprioception else 0

    @property
    def decisions(self) -> int:
        """In a chunk."""
        raise NotImplementedError

    def act(self, reading: Reading, state: Tensor, how: ActionSampling) -> Chosen:
        """Draw n chunks for states [n, state]."""
        raise NotImplementedError

    def score(
        self,
        reading: Reading,
        state: Tensor,
        chosen: Chosen,
        valid: Tensor,
        old: Tensor | None,
        reference: Tensor | None,
    ) -> dict[str, Tensor]:
        """Fields of `mmrl.rollouts.Replay`, each [n, decisions, ...], and those of its extras behind EXTRA. valid
        [n, chunk] bool: which actions were executed; the others count for nothing. old, reference: what "prediction"
        was under the policy that made the rollouts, and under the reference policy."""
        raise NotImplementedError

    def teach(self, actions: Tensor, seeds: Sequence[int]) -> Chosen:
        """actions [n, chunk, action] in [-1, 1]; what is random in learning them comes from each one's seed."""
        return {"actions": actions}

    def save(self, folder: Path, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Writes what has a file of its own in a published format, and returns the rest. state: of this module."""
        return state

    def decided(self, valid: Tensor, chosen: Chosen) -> Tensor:
        """[n, decisions] bool: which decisions count. valid [n, chunk] bool: which actions were executed."""
        return repeat(valid.any(1), "n -> n d", d=self.decisions)

    def reasoning_steps(self, chosen: Chosen) -> Tensor:
        """[n] int64: how many latents were drawn before each chunk, of heads that reason."""
        raise NotImplementedError


class LevelledHead(Head):
    """A head whose likelihood is a product over the numbers of a chunk. A decision is a number, an action or the chunk,
    as `level` says, and it is scored at the temperature that it was sampled with."""

    def __init__(self, level: Level, action: Actions, action_dim: int, state_dim: int) -> None:
        super().__init__(action, action_dim, state_dim)
        self.level = level

    @property
    def decisions(self) -> int:
        chunk, size = self.shape
        return {"token": chunk * size, "action": chunk, "chunk": 1}[self.level]

    def teach(self, actions: Tensor, seeds: Sequence[int]) -> Chosen:
        return {"actions": actions, "temperature": torch.ones(len(actions), dtype=torch.float64)}

    def decided(self, valid: Tensor, chosen: Chosen) -> Tensor:
        if self.level == "chunk":
            return valid.any(1, keepdim=True)
        return repeat(valid, "n c -> n (c k)", k=self.shape[1] if self.level == "token" else 1)

    def _temperature(self, how: ActionSampling) -> Tensor:
        """[n] float64. The likeliest actions are not drawn from any distribution; they are scored at 1."""
        return torch.full((len(how.seeds),), how.temperature or 1.0, dtype=torch.float64)

    def _by_level(self, values: Tensor, valid: Tensor) -> Tensor:
        """[n, chunk, action] summed over what is one decision, and that is executed: [n, decisions]."""
        values = values.where(valid[..., None], 0)
        pattern = {"token": "n c a -> n (c a)", "action": "n c a -> n c", "chunk": "n c a -> n"}[self.level]
        return reduce(values, pattern, "sum").view(len(values), -1)


class StateToken(nn.Module):
    """The robot's state as one more token behind the prompt; none where there is no state."""

    def __init__(self, state_dim: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.project = nn.Linear(state_dim, width) if state_dim else None

    def forward(self, state: Tensor) -> Tensor:
        """[n, state] -> [n, 1 or 0, width]"""
        if self.project is None:
            return state.new_zeros(len(state), 0, self.width)
        return rearrange(self.project(state), "n w -> n 1 w")


class TokenHead(LevelledHead):
    """Every number of every action is a token; logits are made for the action columns only."""

    def __init__(
        self, settings: TokenActions, action: Actions, backbone: TokenBackbone, action_dim: int, state_dim: int
    ) -> None:
        """Raises UserError for more bins than the vocabulary has ids."""
        super().__init__(settings.level, action, action_dim, state_dim)
        self.codec = ActionCodec(backbone.vocabulary, settings.bins)
        if self.codec.first < 0:
            raise UserError(f"action.head.bins={settings.bins}, but the vocabulary has only {backbone.vocabulary} ids")
        self.decoding, self.width = settings.decoding, backbone.width
        self._backbone = [backbone]  # in a list: its parameters are not this module's
        self.state = StateToken(self.state_dim, self.width)
        self.tokens = action.chunk * action_dim
        parallel = self.decoding == "parallel"
        self.queries = nn.Parameter(torch.randn(self.tokens, self.width) * 0.02) if parallel else None

    def act(self, reading: Reading, state: Tensor, how: ActionSampling) -> Chosen:
        generators = [torch.Generator(state.device).manual_seed(seed) for seed in how.seeds]

        def choose(logits: Tensor) -> Tensor:
            return (logits if how.temperature == 0 else draw(logits / how.temperature, generators)).argmax(-1)

        if self.decoding != "autoregressive":
            columns = choose(self._logits(self._read(reading, state, None)))
        else:
            hidden, taken = self._begin(reading, state), []
            for place in range(self.tokens):
                taken.append(choose(self._logits(hidden)))
                if place + 1 < self.tokens:
                    hidden = extend(reading, self._embed(taken[-1][:, None]))[:, -1]
            columns = torch.stack(taken, 1)
        return {"columns": columns, "actions": self._actions(columns), "temperature": self._temperature(how)}

    def score(
        self,
        reading: Reading,
        state: Tensor,
        chosen: Chosen,
        valid: Tensor,
        old: Tensor | None,
        reference: Tensor | None,
    ) -> dict[str, Tensor]:
        columns = chosen["columns"]
        temperatures, place = chosen["temperature"].unique(return_inverse=True)
        order = place.argsort(stable=True)  # the rows of one temperature side by side
        counts = place.bincount(minlength=len(temperatures)).tolist()
        hidden = self._read(reading, state, columns)[order].split(counts)
        ids = self.codec.ids(columns)[order].split(counts)
        found = [
            hidden_logprob(h, self._weight, i, temperature=t, columns=(self.codec.first, self.codec.vocabulary))
            for h, i, t in zip(hidden, ids, temperatures.tolist(), strict=True)
        ]
        logp, entropy = (
            torch.cat(parts)[order.argsort()].view(-1, *self.shape)
            for parts in ([f.logp for f in found], [f.entropy for f in found])
        )
        return {"logp": self._by_level(logp, valid), "entropy": self._by_level(entropy, valid)}

    def teach(self, actions: Tensor, seeds: Sequence[int]) -> Chosen:
        return {**super().teach(actions, seeds), "columns": self.codec.encode(actions).flatten(1)}

    def _begin(self, reading: Reading, state: Tensor) -> Tensor:
        """[n, width], from which the first token follows."""
        start = self.state(state)
        return reading.last if start.shape[1] == 0 else extend(reading, start)[:, -1]

    def _read(self, reading: Reading, state: Tensor, columns: Tensor | None) -> Tensor:
        """[n, token, width], from each of which a token follows."""
        if self.queries is not None:
            start = self.state(state)
            asked = torch.cat([start, repeat(self.queries, "t w -> n t w", n=len(state))], 1)
            return extend(reading, asked)[:, start.shape[1] :]
        if self.decoding == "bidirectional":
            start = self.state(state)
            empty = start.new_zeros(len(state), self.tokens, self.width)
            found = cast(JointReading, reading).together(torch.cat([start, empty], 1))
            return found[:, start.shape[1] : -1]  # what stands before each place
        assert columns is not None
        first = rearrange(self._begin(reading, state), "n w -> n 1 w")
        if self.tokens == 1:
            return first
        return torch.cat([first, extend(reading, self._embed(columns[:, :-1]))], 1)

    def _embed(self, columns: Tensor) -> Tensor:
        return self._backbone[0].input_embeddings(self.codec.ids(columns))

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._weight[self.codec.first : self.codec.vocabulary]).float()

    @property
    def _weight(self) -> Tensor:
        return self._backbone[0].output_weight

    def _actions(self, columns: Tensor) -> Tensor:
        return self.codec.decode(columns).view(-1, *self.shape)


class LaplaceHead(LevelledHead):
    """Actions with a median and a learned scale, which the temperature multiplies (RIPT-VLA, arXiv 2505.17016)."""

    def __init__(self, settings: LaplaceActions, action: Actions, action_dim: int, state_dim: int) -> None:
        super().__init__(settings.level, action, action_dim, state_dim)
        self.log_scale = nn.Parameter(torch.full((action.chunk, action_dim), math.log(settings.scale)))

    def median(self, reading: Reading, state: Tensor) -> Tensor:
        """[n, chunk, action]"""
        raise NotImplementedError

    def act(self, reading: Reading, state: Tensor, how: ActionSampling) -> Chosen:
        median = self.median(reading, state).float()
        uniform = torch.stack(
            [torch.rand(median.shape[1:], generator=torch.Generator().manual_seed(seed)) for seed in how.seeds]
        ).to(median.device)
        centred = (uniform - 0.5).clamp(-0.5 + CLIP, 0.5 - CLIP)
        noise = -centred.sign() * torch.log1p(-2 * centred.abs())
        actions = median + how.temperature * self.log_scale.float().exp() * noise
        return {"actions": actions, "temperature": self._temperature(how)}

    def score(
        self,
        reading: Reading,
        state: Tensor,
        chosen: Chosen,
        valid: Tensor,
        old: Tensor | None,
        reference: Tensor | None,
    ) -> dict[str, Tensor]:
        median = self.median(reading, state).float()
        log_scale = self.log_scale.float() + chosen["temperature"].log().float()[:, None, None]
        logp = -(chosen["actions"] - median).abs() / log_scale.exp() - log_scale - math.log(2)
        return {"logp": self._by_level(logp, valid), "entropy": self._by_level(1 + math.log(2) + log_scale, valid)}


class RegressionHead(LaplaceHead):
    """One query an action, read by an MLP (OpenVLA-OFT, arXiv 2502.19645, with one token an action)."""

    def __init__(
        self, settings: RegressionActions, action: Actions, action_dim: int, state_dim: int, width: int
    ) -> None:
        """width: of the backbone."""
        super().__init__(settings, action, action_dim, state_dim)
        self.state = StateToken(self.state_dim, width)
        self.queries = nn.Parameter(torch.randn(action.chunk, width) * 0.02)
        self.leave = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, action_dim))

    def median(self, reading: Reading, state: Tensor) -> Tensor:
        start = self.state(state)
        asked = torch.cat([start, repeat(self.queries, "c w -> n c w", n=len(state))], 1)
        return self.leave(extend(reading, asked)[:, start.shape[1] :])


class BridgeHead(LaplaceHead):
    """Queries are read from every layer, and so is the prompt: see `BridgeBlock`."""

    every_layer = True

    def __init__(self, settings: BridgeActions, action: Actions, action_dim: int, state_dim: int, width: int) -> None:
        """width: of the backbone."""
        super().__init__(settings, action, action_dim, state_dim)
        own = settings.width
        self.state = StateToken(self.state_dim, width)
        self.queries = nn.Parameter(torch.randn(settings.queries, width) * 0.02)
        self.start = nn.Parameter(torch.randn(action.chunk, own) * 0.02)
        self.blocks = nn.ModuleList(BridgeBlock(own, width, max(1, own // 32)) for _ in range(settings.depth))
        self.leave = nn.Sequential(nn.LayerNorm(own), nn.Linear(own, action_dim))

    def median(self, reading: Reading, state: Tensor) -> Tensor:
        prompt, mask = reading.layers[-len(self.blocks) :], reading.mask.bool()
        extend(reading, torch.cat([self.state(state), repeat(self.queries, "q w -> n q w", n=len(state))], 1))
        queries = reading.layers[-len(self.blocks) :]
        h = repeat(self.start, "c w -> n c w", n=len(state))
        for block, p, q in zip(self.blocks, prompt, queries, strict=True):
            h = block(h, p, mask, q)
        return self.leave(h)


def extend(reading: Reading, embeddings: Tensor) -> Tensor:
    return reading.extend(embeddings, torch.ones(embeddings.shape[:2], dtype=torch.long, device=embeddings.device))
