"""Action heads: networks that sample and score chunks of actions, given the hidden states of a backbone.

A chunk is the actions that are executed before the next observation. A head has three methods. `act` samples chunks.
`score` returns their likelihood, by the same code path, so that the ratio is exactly 1 before the first update.
`encode_demonstrations` converts demonstrated actions to the inputs of `score`. Sampled chunks are a dictionary of
tensors [n, ...] of fixed shapes, with "actions" [n, chunk, action].
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
from mmrl.generation.sampling import add_gumbel_noise
from mmrl.kernels import hidden_logprob
from mmrl.policies.vla.heads.codec import ActionCodec
from mmrl.policies.vla.heads.laplace_settings import BridgeActions, LaplaceActions, RegressionActions
from mmrl.policies.vla.heads.layers import BridgeBlock
from mmrl.policies.vla.settings import Actions, Level, TokenActions

SampledChunks = dict[str, Tensor]
CLIP = 1e-6  # distance of uniform samples from 0 and 1, where Laplace noise is infinite
BASE = "base."  # prefix of the parameters of `Head.base`
EXTRA = "extras."  # prefix of fields that only some heads have; see `Replay.extras`


class EncodedPrefix(Protocol):
    """The hidden states of n prefixes: images and instruction, for some backbones the robot's state too."""

    hidden: Tensor  # [n, token, width], last hidden states
    mask: Tensor  # [n, token], 0 at padding
    last: Tensor  # [n, width], the last hidden state of each prefix's last token
    # hidden states of every layer, [n, token, width]: of the prefix, or of the tokens of the last call of `extend`
    layers: tuple[Tensor, ...]

    def extend(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Appends embeddings `tokens` [n, t, width], which attend to the prefix and to earlier tokens.

        mask: [n, t], 0 at padding. Returns the last hidden states of these tokens, [n, t, width]."""
        ...


class BidirectionalEncodedPrefix(EncodedPrefix, Protocol):
    """A prefix that is encoded together with the tokens behind it in one bidirectional pass; see
    `mmrl.policies.vla.backbones.openvla.BidirectionalPrefix`."""

    def encode_with(self, tokens: Tensor) -> Tensor:
        """Returns last hidden states [n, 1 + t, width] of the prefix's last token and of embeddings `tokens` [n, t,
        width]; all tokens attend to one another."""
        ...


class TokenBackbone(Protocol):
    """The attributes of a backbone that heads of action tokens use; see
    `mmrl.policies.vla.backbones.backbone.Backbone`."""

    width: int
    vocabulary: int

    @property
    def input_embeddings(self) -> nn.Module: ...

    @property
    def output_weight(self) -> Tensor: ...


@dataclass(frozen=True)
class ActionSampling:
    """Options of sampling one chunk for each of n observations."""

    seeds: Sequence[int]  # n, one for each chunk
    temperature: float = 1.0  # 0: the likeliest actions
    training: bool = True  # False omits tensors that only `score` needs, and may use more denoising steps
    groups: Sequence[int] = ()  # n, the seed of each rollout's group; a group shares the window of scored steps
    step: int = 0  # finished training steps


class Head(nn.Module):
    """The action head of a policy: it samples and scores chunks of actions, `shape` [chunk, action].

    every_layer: whether the head needs the hidden states of all layers of the backbone.
    last_layer_only: whether it needs only the last hidden states of the prefix, so that prefixes of a frozen backbone
        can be cached.
    samples_latents: whether it samples latents before a chunk; `num_latents` counts them.
    optional_parameters: prefixes of names of parameters that a saved head may lack, because training adds them or
        because they are saved in a file of their own.
    base: the frozen head that this head is built around; None if there is none.
    """

    every_layer = False
    last_layer_only = False
    samples_latents = False
    optional_parameters: tuple[str, ...] = ()

    def __init__(self, action: Actions, action_dim: int, state_dim: int) -> None:
        """state_dim: size of the robot's state; `self.state_dim` is 0 if the head does not read the state."""
        super().__init__()
        self.base: Head | None = None  # the trained head that a head of some types is built around
        self.shape = (action.chunk, action_dim)
        self.state_dim = state_dim if action.proprioception else 0

    @property
    def decisions(self) -> int:
        """Number of decisions in a chunk."""
        raise NotImplementedError

    @property
    def sampled_shape(self) -> tuple[int, int]:
        """Shape of what is sampled for a chunk: the chunk's, or that of the noise from which it is denoised."""
        return self.shape

    def act(self, prefix: EncodedPrefix, state: Tensor, sampling: ActionSampling) -> SampledChunks:
        """Samples a chunk for each of n observations. prefix: their prefixes; state: [n, state]."""
        raise NotImplementedError

    def score(
        self,
        prefix: EncodedPrefix,
        state: Tensor,
        sampled: SampledChunks,
        valid: Tensor,
        old: Tensor | None,
        reference: Tensor | None,
    ) -> dict[str, Tensor]:
        """Scores n sampled chunks: returns fields of `mmrl.rollouts.Replay` such as "logp", each [n, decisions, ...],
        and its extras under names that begin with EXTRA.

        prefix, state: the inputs of `act` for the observations at which the n chunks were sampled. sampled: the chunks,
        as `act` returns them. valid: [n, chunk] bool, which actions were executed; the others do not contribute. old,
        reference: the field "prediction" under the policy that sampled the rollouts and under the reference policy,
        from which divergences are computed; None where they are not needed."""
        raise NotImplementedError

    def encode_demonstrations(self, actions: Tensor, seeds: Sequence[int]) -> SampledChunks:
        """Converts demonstrated actions [n, chunk, action] in [-1, 1] to the inputs of `score`, as if the head had
        sampled them. seeds: [n], for the noise and timesteps that some heads sample for a chunk."""
        return {"actions": actions}

    def save(self, folder: Path, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Saves the weights that have a file of their own in a published format, such as a base head's, and returns the
        remaining weights. state: the state dict of this module."""
        if self.base is None:
            return state
        rest = self.base.save(folder, {n.removeprefix(BASE): v for n, v in state.items() if n.startswith(BASE)})
        own = {name: value for name, value in state.items() if not name.startswith(BASE)}
        return {**own, **{BASE + name: value for name, value in rest.items()}}

    def decision_mask(self, valid: Tensor, sampled: SampledChunks) -> Tensor:
        """Returns which decisions are trained on, [n, decisions] bool. valid: [n, chunk] bool, which actions were
        executed."""
        return repeat(valid.any(1), "n -> n d", d=self.decisions)

    def num_latents(self, sampled: SampledChunks) -> Tensor:
        """Returns the number of latents that were sampled before each chunk, [n] int64; see `samples_latents`."""
        raise NotImplementedError


class LevelledHead(Head):
    """A head whose likelihood factorises over the numbers of a chunk. `level` says whether a decision is one number of
    an action, an action or the whole chunk. Actions are scored at the temperature at which they were sampled."""

    def __init__(self, level: Level, action: Actions, action_dim: int, state_dim: int) -> None:
        super().__init__(action, action_dim, state_dim)
        self.level = level

    @property
    def decisions(self) -> int:
        chunk, size = self.shape
        return {"token": chunk * size, "action": chunk, "chunk": 1}[self.level]

    def encode_demonstrations(self, actions: Tensor, seeds: Sequence[int]) -> SampledChunks:
        """Returns demonstrated actions with a temperature of 1."""
        return {"actions": actions, "temperature": torch.ones(len(actions), dtype=torch.float64)}

    def decision_mask(self, valid: Tensor, sampled: SampledChunks) -> Tensor:
        if self.level == "chunk":
            return valid.any(1, keepdim=True)
        return repeat(valid, "n c -> n (c k)", k=self.shape[1] if self.level == "token" else 1)

    def _temperature(self, sampling: ActionSampling) -> Tensor:
        """Returns the temperature at which chunks are scored, [n] float64. It is 1 for the likeliest actions
        (temperature 0), for which no density is defined."""
        return torch.full((len(sampling.seeds),), sampling.temperature or 1.0, dtype=torch.float64)

    def _by_level(self, values: Tensor, valid: Tensor) -> Tensor:
        """Sums values [n, chunk, action] over the numbers of each decision, executed actions only. Returns
        [n, decisions]."""
        values = values.where(valid[..., None], 0)
        pattern = {"token": "n c a -> n (c a)", "action": "n c a -> n c", "chunk": "n c a -> n"}[self.level]
        return reduce(values, pattern, "sum").view(len(values), -1)


class StateToken(nn.Module):
    """Projects the robot's state to one token behind the prompt, or to no token if the head does not read the state."""

    def __init__(self, state_dim: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.project = nn.Linear(state_dim, width) if state_dim else None

    def forward(self, state: Tensor) -> Tensor:
        """Returns token embeddings [n, 1 or 0, width] for states [n, state]."""
        if self.project is None:
            return state.new_zeros(len(state), 0, self.width)
        return rearrange(self.project(state), "n w -> n 1 w")


class TokenHead(LevelledHead):
    """A head that predicts each number of each action as a token.

    Logits are computed for action tokens only. A column is the position of an action token among them: the first action
    token has column 0; see `ActionCodec`."""

    def __init__(
        self, settings: TokenActions, action: Actions, backbone: TokenBackbone, action_dim: int, state_dim: int
    ) -> None:
        """Raises UserError for more bins than the vocabulary has ids."""
        super().__init__(settings.level, action, action_dim, state_dim)
        self.codec = ActionCodec(backbone.vocabulary, settings.bins)
        if self.codec.first < 0:
            raise UserError(
                f"action.head.bins={settings.bins}, but the vocabulary has only {backbone.vocabulary} ids; lower it"
            )
        self.decoding, self.width = settings.decoding, backbone.width
        self._backbone = [backbone]  # in a list: its parameters are not this module's
        self.state = StateToken(self.state_dim, self.width)
        self.tokens = action.chunk * action_dim
        parallel = self.decoding == "parallel"
        self.queries = nn.Parameter(torch.randn(self.tokens, self.width) * 0.02) if parallel else None

    def act(self, prefix: EncodedPrefix, state: Tensor, sampling: ActionSampling) -> SampledChunks:
        """Samples the tokens of chunks, all at once or one after the other; see `Head.act`. Returns also "columns" [n,
        chunk x action], the sampled tokens as indices among the action tokens."""
        generators = [torch.Generator(state.device).manual_seed(seed) for seed in sampling.seeds]

        def select_columns(logits: Tensor) -> Tensor:
            """Samples columns [...] from logits [..., bin], or takes the likeliest ones at temperature 0."""
            if sampling.temperature == 0:
                return logits.argmax(-1)
            return add_gumbel_noise(logits / sampling.temperature, generators).argmax(-1)

        if self.decoding != "autoregressive":
            columns = select_columns(self._logits(self._hidden_states(prefix, state, None)))
        else:
            hidden, sampled_columns = self._first_hidden_state(prefix, state), list[Tensor]()
            for index in range(self.tokens):
                sampled_columns.append(select_columns(self._logits(hidden)))
                if index + 1 < self.tokens:
                    hidden = extend(prefix, self._embed(sampled_columns[-1][:, None]))[:, -1]
            columns = torch.stack(sampled_columns, 1)
        return {"columns": columns, "actions": self._actions(columns), "temperature": self._temperature(sampling)}

    def score(
        self,
        prefix: EncodedPrefix,
        state: Tensor,
        sampled: SampledChunks,
        valid: Tensor,
        old: Tensor | None,
        reference: Tensor | None,
    ) -> dict[str, Tensor]:
        """Returns "logp" and "entropy" of the sampled tokens, [n, decisions] each; see `Head.score`."""
        columns = sampled["columns"]
        # The kernel takes one temperature, so rows are sorted and split by temperature.
        temperatures, temperature_index = sampled["temperature"].unique(return_inverse=True)
        order = temperature_index.argsort(stable=True)
        counts = temperature_index.bincount(minlength=len(temperatures)).tolist()
        hidden = self._hidden_states(prefix, state, columns)[order].split(counts)
        ids = self.codec.ids(columns)[order].split(counts)
        scores = [
            hidden_logprob(h, self._weight, i, temperature=t, columns=(self.codec.first, self.codec.vocabulary))
            for h, i, t in zip(hidden, ids, temperatures.tolist(), strict=True)
        ]
        original_order = order.argsort()
        logp = torch.cat([part.logp for part in scores])[original_order].view(-1, *self.shape)
        entropy = torch.cat([part.entropy for part in scores])[original_order].view(-1, *self.shape)
        return {"logp": self._by_level(logp, valid), "entropy": self._by_level(entropy, valid)}

    def encode_demonstrations(self, actions: Tensor, seeds: Sequence[int]) -> SampledChunks:
        """Adds "columns" [n, chunk x action], the bins of the demonstrated actions."""
        return {**super().encode_demonstrations(actions, seeds), "columns": self.codec.encode(actions).flatten(1)}

    def _first_hidden_state(self, prefix: EncodedPrefix, state: Tensor) -> Tensor:
        """Returns the hidden states [n, width] that predict the first action token."""
        state_token = self.state(state)
        return prefix.last if state_token.shape[1] == 0 else extend(prefix, state_token)[:, -1]

    def _hidden_states(self, prefix: EncodedPrefix, state: Tensor, columns: Tensor | None) -> Tensor:
        """Returns the hidden states [n, token, width] that predict the action tokens. columns: [n, token], the action
        tokens, which only autoregressive decoding reads."""
        if self.queries is not None:
            state_token = self.state(state)
            queries = torch.cat([state_token, repeat(self.queries, "t w -> n t w", n=len(state))], 1)
            return extend(prefix, queries)[:, state_token.shape[1] :]
        if self.decoding == "bidirectional":
            state_token = self.state(state)
            empty = state_token.new_zeros(len(state), self.tokens, self.width)
            hidden = cast(BidirectionalEncodedPrefix, prefix).encode_with(torch.cat([state_token, empty], 1))
            return hidden[:, state_token.shape[1] : -1]  # a token is predicted at the position before it
        assert columns is not None
        first = rearrange(self._first_hidden_state(prefix, state), "n w -> n 1 w")
        if self.tokens == 1:
            return first
        return torch.cat([first, extend(prefix, self._embed(columns[:, :-1]))], 1)

    def _embed(self, columns: Tensor) -> Tensor:
        """Returns the input embeddings of action tokens: columns [n, token] become [n, token, width]."""
        return self._backbone[0].input_embeddings(self.codec.ids(columns))

    def _logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits of all action tokens, [..., bin] fp32, from hidden states [..., width]."""
        return F.linear(hidden, self._weight[self.codec.first : self.codec.vocabulary]).float()

    @property
    def _weight(self) -> Tensor:
        """The output matrix of the language model, [token id, width]."""
        return self._backbone[0].output_weight

    def _actions(self, columns: Tensor) -> Tensor:
        """Decodes columns [n, chunk x action] to actions [n, chunk, action]."""
        return self.codec.decode(columns).view(-1, *self.shape)


class LaplaceHead(LevelledHead):
    """A head with Laplace-distributed actions: a median and a learned scale, which the temperature multiplies
    (RIPT-VLA, arXiv 2505.17016)."""

    def __init__(self, settings: LaplaceActions, action: Actions, action_dim: int, state_dim: int) -> None:
        super().__init__(settings.level, action, action_dim, state_dim)
        self.log_scale = nn.Parameter(torch.full((action.chunk, action_dim), math.log(settings.scale)))

    def median(self, prefix: EncodedPrefix, state: Tensor) -> Tensor:
        """Predicts the median of the actions, [n, chunk, action]."""
        raise NotImplementedError

    def act(self, prefix: EncodedPrefix, state: Tensor, sampling: ActionSampling) -> SampledChunks:
        """Samples actions around the predicted median; see `Head.act`."""
        median = self.median(prefix, state).float()
        uniform = torch.stack(
            [torch.rand(median.shape[1:], generator=torch.Generator().manual_seed(seed)) for seed in sampling.seeds]
        ).to(median.device)
        # Noise of a Laplace distribution with scale 1: its inverse cumulative function at uniform numbers.
        centred = (uniform - 0.5).clamp(-0.5 + CLIP, 0.5 - CLIP)
        noise = -centred.sign() * torch.log1p(-2 * centred.abs())
        actions = median + sampling.temperature * self.log_scale.float().exp() * noise
        return {"actions": actions, "temperature": self._temperature(sampling)}

    def score(
        self,
        prefix: EncodedPrefix,
        state: Tensor,
        sampled: SampledChunks,
        valid: Tensor,
        old: Tensor | None,
        reference: Tensor | None,
    ) -> dict[str, Tensor]:
        """Returns "logp" and "entropy" of the actions, [n, decisions] each; see `Head.score`."""
        median = self.median(prefix, state).float()
        log_scale = self.log_scale.float() + sampled["temperature"].log().float()[:, None, None]
        logp = -(sampled["actions"] - median).abs() / log_scale.exp() - log_scale - math.log(2)
        return {"logp": self._by_level(logp, valid), "entropy": self._by_level(1 + math.log(2) + log_scale, valid)}


class RegressionHead(LaplaceHead):
    """A Laplace head with one learned query for each action, whose hidden state an MLP maps to the median (after
    OpenVLA-OFT, arXiv 2502.19645)."""

    def __init__(
        self, settings: RegressionActions, action: Actions, action_dim: int, state_dim: int, width: int
    ) -> None:
        """width: size of the backbone's hidden states."""
        super().__init__(settings, action, action_dim, state_dim)
        self.state = StateToken(self.state_dim, width)
        self.queries = nn.Parameter(torch.randn(action.chunk, width) * 0.02)
        self.leave = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, action_dim))

    def median(self, prefix: EncodedPrefix, state: Tensor) -> Tensor:
        state_token = self.state(state)
        queries = torch.cat([state_token, repeat(self.queries, "c w -> n c w", n=len(state))], 1)
        return self.leave(extend(prefix, queries)[:, state_token.shape[1] :])


class BridgeHead(LaplaceHead):
    """A Laplace head that attends to the hidden states of prefix and learned queries in the last layers of the
    backbone, one layer for each `BridgeBlock` (VLA-Adapter, arXiv 2509.09372)."""

    every_layer = True

    def __init__(self, settings: BridgeActions, action: Actions, action_dim: int, state_dim: int, width: int) -> None:
        """width: size of the backbone's hidden states."""
        super().__init__(settings, action, action_dim, state_dim)
        bridge_width = settings.width
        self.state = StateToken(self.state_dim, width)
        self.queries = nn.Parameter(torch.randn(settings.queries, width) * 0.02)
        self.start = nn.Parameter(torch.randn(action.chunk, bridge_width) * 0.02)
        self.blocks = nn.ModuleList(
            BridgeBlock(bridge_width, width, max(1, bridge_width // 32)) for _ in range(settings.depth)
        )
        self.leave = nn.Sequential(nn.LayerNorm(bridge_width), nn.Linear(bridge_width, action_dim))

    def median(self, prefix: EncodedPrefix, state: Tensor) -> Tensor:
        """Predicts the median of the actions, [n, chunk, action], by attention to the backbone's last layers."""
        prefix_layers, mask = prefix.layers[-len(self.blocks) :], prefix.mask.bool()
        # This call changes `prefix.layers` to the hidden states of the state token and the queries.
        extend(prefix, torch.cat([self.state(state), repeat(self.queries, "q w -> n q w", n=len(state))], 1))
        query_layers = prefix.layers[-len(self.blocks) :]
        h = repeat(self.start, "c w -> n c w", n=len(state))
        for block, prefix_layer, query_layer in zip(self.blocks, prefix_layers, query_layers, strict=True):
            h = block(h, prefix_layer, mask, query_layer)
        return self.leave(h)


def extend(prefix: EncodedPrefix, embeddings: Tensor) -> Tensor:
    """Appends embeddings [n, t, width] without padding to a prefix. Returns their last hidden states, [n, t, width]."""
    return prefix.extend(embeddings, torch.ones(embeddings.shape[:2], dtype=torch.long, device=embeddings.device))
