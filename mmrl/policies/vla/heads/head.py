"""Action heads, which map a backbone's reading to a chunk of actions, and score chunks.

A head has three methods: `act` draws a chunk, `score` returns the likelihood of a chunk (by the same code path, so that
the ratio is exactly 1 before the first update), `teach` converts demonstrated actions to the inputs of `score`. A
choice is a dictionary of tensors [n, ...] of fixed shapes, with "actions" [n, chunk, action].
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
BASE = "base."  # prefix of the parameters of `Head.base`
EXTRA = "extras."  # prefix of fields that only some heads have; see `Replay.extras`


class Reading(Protocol):
    """A backbone's reading of n prompts."""

    hidden: Tensor  # [n, token, width], the last layer
    mask: Tensor  # [n, token], 1 where there is a token
    last: Tensor  # [n, width], of each prompt's last token
    layers: tuple[Tensor, ...]  # of every layer [n, token, width], of the tokens that were read last

    def extend(self, tokens: Tensor, mask: Tensor) -> Tensor: ...


class JointReading(Reading, Protocol):
    """A reading of prompt and further tokens in one bidirectional pass; see
    `mmrl.policies.vla.backbones.openvla.BidirectionalPrefix`."""

    def together(self, tokens: Tensor) -> Tensor: ...


class TokenBackbone(Protocol):
    """The interface of a backbone for heads with tokens, see `mmrl.policies.vla.backbones.backbone.Backbone`."""

    width: int
    vocabulary: int

    @property
    def input_embeddings(self) -> nn.Module: ...

    @property
    def output_weight(self) -> Tensor: ...


@dataclass(frozen=True)
class ActionSampling:
    """Options of drawing the chunks of n observations."""

    seeds: Sequence[int]  # n, one for each chunk
    temperature: float = 1.0  # 0: the likeliest actions
    training: bool = True  # False omits tensors that only `score` needs, and may use more denoising steps
    groups: Sequence[int] = ()  # n, the seed of each one's group, for what a group shares
    step: int = 0  # finished training steps


class Head(nn.Module):
    """Turns readings into chunks of `shape` [chunk, action].

    `every_layer`: whether it needs all layers of the backbone. `context_only`: whether it needs only the
    prompt's last layer, so that readings of a frozen backbone can be cached. `reasons`: whether it draws latents before
    a chunk, which `reasoning_steps` counts. `new_parts`: prefixes of names of parameters that a saved head may lack,
    because training adds them, or because they have files of their own. `base`: the frozen head that it is built
    around, if there is one.
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
        """Number of decisions in a chunk."""
        raise NotImplementedError

    def act(self, reading: Reading, state: Tensor, sampling: ActionSampling) -> Chosen:
        """Draws n chunks for states [n, state]."""
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
        """Returns fields of `mmrl.rollouts.Replay`, each [n, decisions, ...], and its extras with the prefix EXTRA.
        valid: [n, chunk] bool, which actions were executed; the others do not count. old, reference: "prediction" under
        the policy that generated the rollouts, and under the reference policy."""
        raise NotImplementedError

    def teach(self, actions: Tensor, seeds: Sequence[int]) -> Chosen:
        """Encodes demonstrated actions [n, chunk, action] in [-1, 1] as if the head had sampled them, for `score`.
        seeds: one a chunk of actions, [n]; heads that draw noise or a timestep take it from there."""
        return {"actions": actions}

    def save(self, folder: Path, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Writes parts with a file of their own in a published format, and returns the rest. state: of this module."""
        if self.base is None:
            return state
        rest = self.base.save(folder, {n.removeprefix(BASE): v for n, v in state.items() if n.startswith(BASE)})
        own = {name: value for name, value in state.items() if not name.startswith(BASE)}
        return {**own, **{BASE + name: value for name, value in rest.items()}}

    def decided(self, valid: Tensor, chosen: Chosen) -> Tensor:
        """Returns which decisions count, [n, decisions] bool. valid: [n, chunk] bool, which actions were executed."""
        return repeat(valid.any(1), "n -> n d", d=self.decisions)

    def reasoning_steps(self, chosen: Chosen) -> Tensor:
        """Returns the number of latents that were drawn before each chunk, [n] int64, for heads that reason."""
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
        """Encodes demonstrated actions, which are scored at temperature 1."""
        return {"actions": actions, "temperature": torch.ones(len(actions), dtype=torch.float64)}

    def decided(self, valid: Tensor, chosen: Chosen) -> Tensor:
        if self.level == "chunk":
            return valid.any(1, keepdim=True)
        return repeat(valid, "n c -> n (c k)", k=self.shape[1] if self.level == "token" else 1)

    def _temperature(self, sampling: ActionSampling) -> Tensor:
        """Returns the temperature for scoring, [n] float64: 1 for actions at temperature 0, which have no density."""
        return torch.full((len(sampling.seeds),), sampling.temperature or 1.0, dtype=torch.float64)

    def _by_level(self, values: Tensor, valid: Tensor) -> Tensor:
        """Sums values [n, chunk, action] of executed actions over each decision: [n, decisions]."""
        values = values.where(valid[..., None], 0)
        pattern = {"token": "n c a -> n (c a)", "action": "n c a -> n c", "chunk": "n c a -> n"}[self.level]
        return reduce(values, pattern, "sum").view(len(values), -1)


class StateToken(nn.Module):
    """Projects the robot's state to a token behind the prompt; to no token where there is no state."""

    def __init__(self, state_dim: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.project = nn.Linear(state_dim, width) if state_dim else None

    def forward(self, state: Tensor) -> Tensor:
        """Returns tokens [n, 1 or 0, width] of states [n, state]."""
        if self.project is None:
            return state.new_zeros(len(state), 0, self.width)
        return rearrange(self.project(state), "n w -> n 1 w")


class TokenHead(LevelledHead):
    """A head with a token for every number of every action; logits are computed for the action columns only."""

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

    def act(self, reading: Reading, state: Tensor, sampling: ActionSampling) -> Chosen:
        generators = [torch.Generator(state.device).manual_seed(seed) for seed in sampling.seeds]

        def choose(logits: Tensor) -> Tensor:
            return (logits if sampling.temperature == 0 else draw(logits / sampling.temperature, generators)).argmax(-1)

        if self.decoding != "autoregressive":
            columns = choose(self._logits(self._read(reading, state, None)))
        else:
            hidden, taken = self._begin(reading, state), []
            for index in range(self.tokens):
                taken.append(choose(self._logits(hidden)))
                if index + 1 < self.tokens:
                    hidden = extend(reading, self._embed(taken[-1][:, None]))[:, -1]
            columns = torch.stack(taken, 1)
        return {"columns": columns, "actions": self._actions(columns), "temperature": self._temperature(sampling)}

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
        temperatures, groups = chosen["temperature"].unique(return_inverse=True)
        order = groups.argsort(stable=True)  # groups rows of equal temperature
        counts = groups.bincount(minlength=len(temperatures)).tolist()
        hidden = self._read(reading, state, columns)[order].split(counts)
        ids = self.codec.ids(columns)[order].split(counts)
        scores = [
            hidden_logprob(h, self._weight, i, temperature=t, columns=(self.codec.first, self.codec.vocabulary))
            for h, i, t in zip(hidden, ids, temperatures.tolist(), strict=True)
        ]
        logp, entropy = (
            torch.cat(parts)[order.argsort()].view(-1, *self.shape)
            for parts in ([f.logp for f in scores], [f.entropy for f in scores])
        )
        return {"logp": self._by_level(logp, valid), "entropy": self._by_level(entropy, valid)}

    def teach(self, actions: Tensor, seeds: Sequence[int]) -> Chosen:
        """Encodes demonstrated actions as the nearest bins, "columns" [n, chunk x action]."""
        return {**super().teach(actions, seeds), "columns": self.codec.encode(actions).flatten(1)}

    def _begin(self, reading: Reading, state: Tensor) -> Tensor:
        """Returns hidden states [n, width] that predict the first token."""
        start = self.state(state)
        return reading.last if start.shape[1] == 0 else extend(reading, start)[:, -1]

    def _read(self, reading: Reading, state: Tensor, columns: Tensor | None) -> Tensor:
        """Returns hidden states [n, token, width], each of which predicts a token."""
        if self.queries is not None:
            start = self.state(state)
            queries = torch.cat([start, repeat(self.queries, "t w -> n t w", n=len(state))], 1)
            return extend(reading, queries)[:, start.shape[1] :]
        if self.decoding == "bidirectional":
            start = self.state(state)
            empty = start.new_zeros(len(state), self.tokens, self.width)
            hidden = cast(JointReading, reading).together(torch.cat([start, empty], 1))
            return hidden[:, start.shape[1] : -1]  # the token before each position
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
    """A head with Laplace-distributed actions: a median and a learned scale, which the temperature multiplies
    (RIPT-VLA, arXiv 2505.17016)."""

    def __init__(self, settings: LaplaceActions, action: Actions, action_dim: int, state_dim: int) -> None:
        super().__init__(settings.level, action, action_dim, state_dim)
        self.log_scale = nn.Parameter(torch.full((action.chunk, action_dim), math.log(settings.scale)))

    def median(self, reading: Reading, state: Tensor) -> Tensor:
        """Returns the median [n, chunk, action]."""
        raise NotImplementedError

    def act(self, reading: Reading, state: Tensor, sampling: ActionSampling) -> Chosen:
        median = self.median(reading, state).float()
        uniform = torch.stack(
            [torch.rand(median.shape[1:], generator=torch.Generator().manual_seed(seed)) for seed in sampling.seeds]
        ).to(median.device)
        centred = (uniform - 0.5).clamp(-0.5 + CLIP, 0.5 - CLIP)
        noise = -centred.sign() * torch.log1p(-2 * centred.abs())
        actions = median + sampling.temperature * self.log_scale.float().exp() * noise
        return {"actions": actions, "temperature": self._temperature(sampling)}

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
    """A Laplace head with one query an action, read by an MLP (OpenVLA-OFT, arXiv 2502.19645, with one token an
    action)."""

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
        queries = torch.cat([start, repeat(self.queries, "c w -> n c w", n=len(state))], 1)
        return self.leave(extend(reading, queries)[:, start.shape[1] :])


class BridgeHead(LaplaceHead):
    """A Laplace head that reads prompt and queries from every layer: see `BridgeBlock`."""

    every_layer = True

    def __init__(self, settings: BridgeActions, action: Actions, action_dim: int, state_dim: int, width: int) -> None:
        """width: of the backbone."""
        super().__init__(settings, action, action_dim, state_dim)
        bridge_width = settings.width
        self.state = StateToken(self.state_dim, width)
        self.queries = nn.Parameter(torch.randn(settings.queries, width) * 0.02)
        self.start = nn.Parameter(torch.randn(action.chunk, bridge_width) * 0.02)
        self.blocks = nn.ModuleList(
            BridgeBlock(bridge_width, width, max(1, bridge_width // 32)) for _ in range(settings.depth)
        )
        self.leave = nn.Sequential(nn.LayerNorm(bridge_width), nn.Linear(bridge_width, action_dim))

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
