"""From what the backbone read to a chunk of actions, and back to how likely that chunk was.

A head is asked for three things: `act` draws a chunk, `score` says how likely a given one is (the same code path, so
that the ratio is exactly 1 before the first update), `teach` makes of demonstrated actions what `score` takes.
What was chosen is a dictionary of tensors [n, ...] of fixed shapes, "actions" [n, chunk, action] among them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from einops import rearrange, reduce, repeat
from torch import Tensor, nn

from mmrl.generation.sampling import draw
from mmrl.kernels import hidden_logprob
from mmrl.policies.vla.codec import ActionCodec
from mmrl.policies.vla.layers import BridgeBlock, Expert
from mmrl.policies.vla.settings import Actions
from mmrl.samplers.chain import Sampler, gaussian, mixed, run
from mmrl.samplers.settings import Denoising
from mmrl.samplers.sigmas import Grid, linear
from mmrl.samplers.transitions import compare_steps, gaussian_step, reduce_elements

Chosen = dict[str, Tensor]
INITIAL, DRAWS = -1, -2  # counters of a chunk's noise that are not steps of its chain
CLIP = 1e-6


class Reading(Protocol):
    """What a backbone made of n prompts."""

    hidden: Tensor  # [n, token, width], the last layer
    mask: Tensor  # [n, token], 1 where there is a token
    last: Tensor  # [n, width], of each prompt's last token
    layers: tuple[Tensor, ...]  # of every layer [n, token, width], of what was read last

    def extend(self, tokens: Tensor, mask: Tensor) -> Tensor: ...


class Together(Reading, Protocol):
    """A reading that does not end where the prompt ends; see `mmrl.policies.vla.openvla.Together`."""

    def together(self, tokens: Tensor) -> Tensor: ...


class Head(nn.Module):
    """`decisions`: in a chunk. `every_layer`: whether it needs all layers of the backbone. `context_only`: whether it
    needs nothing but the prompt's last layer, so that a frozen backbone is asked once for an observation."""

    every_layer = False
    context_only = False

    def __init__(self, settings: Actions, action_dim: int, state_dim: int, width: int) -> None:
        super().__init__()
        self.settings, self.action_dim, self.width = settings, action_dim, width
        self.state_dim = state_dim if settings.proprioception else 0

    @property
    def decisions(self) -> int:
        chunk = self.settings.chunk
        return {"token": chunk * self.action_dim, "action": chunk, "chunk": 1}[self.settings.level]

    def act(self, reading: Reading, state: Tensor, seeds: Sequence[int], temperature: float, training: bool) -> Chosen:
        """Draw n chunks, each from its own seed; temperature 0: the likeliest. `training` False leaves out what only
        serves to be scored, and may take more care."""
        raise NotImplementedError

    def score(
        self, reading: Reading, state: Tensor, chosen: Chosen, valid: Tensor, old: Tensor | None
    ) -> dict[str, Tensor]:
        """Fields of `mmrl.rollouts.Replay`, each [n, decisions, ...]. valid [n, chunk] bool: which actions were
        executed; the others count for nothing. old: what "prediction" was then."""
        raise NotImplementedError

    def teach(self, actions: Tensor, seeds: Sequence[int]) -> Chosen:
        """actions [n, chunk, action] in [-1, 1]; what is random in learning them comes from each one's seed."""
        return {"actions": actions}

    def decided(self, valid: Tensor) -> Tensor:
        """[n, decisions] bool: which decisions count."""
        per_action = {"token": self.action_dim, "action": 1}
        if self.settings.level == "chunk" or self.settings.head == "flow":
            return repeat(valid.any(1), "n -> n d", d=self.decisions)
        return repeat(valid, "n c -> n (c k)", k=per_action[self.settings.level])

    def _by_level(self, values: Tensor, valid: Tensor) -> Tensor:
        """[n, chunk, action] summed over what is one decision, and that is executed: [n, decisions]."""
        values = values.where(valid[..., None], 0)
        pattern = {"token": "n c a -> n (c a)", "action": "n c a -> n c", "chunk": "n c a -> n"}[self.settings.level]
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


class TokenHead(Head):
    """Every number of every action is a token; logits are made for the action columns only."""

    def __init__(
        self, settings: Actions, action_dim: int, state_dim: int, width: int, codec: ActionCodec, backbone: nn.Module
    ) -> None:
        super().__init__(settings, action_dim, state_dim, width)
        self.codec = codec
        self.temperature = 1.0  # of the distribution that is drawn from and scored
        self._backbone = [backbone]  # in a list: its parameters are not this module's
        self.state = StateToken(self.state_dim, width)
        self.tokens = settings.chunk * action_dim
        parallel = settings.decoding == "parallel"
        self.queries = nn.Parameter(torch.randn(self.tokens, width) * 0.02) if parallel else None

    def act(self, reading: Reading, state: Tensor, seeds: Sequence[int], temperature: float, training: bool) -> Chosen:
        generators = [torch.Generator(state.device).manual_seed(seed) for seed in seeds]

        def choose(logits: Tensor) -> Tensor:
            return (logits if temperature == 0 else draw(logits / temperature, generators)).argmax(-1)

        if self.settings.decoding != "autoregressive":
            columns = choose(self._logits(self._read(reading, state, None)))
        else:
            hidden, taken = self._begin(reading, state), []
            for place in range(self.tokens):
                taken.append(choose(self._logits(hidden)))
                if place + 1 < self.tokens:
                    hidden = extend(reading, self._embed(taken[-1][:, None]))[:, -1]
            columns = torch.stack(taken, 1)
        return {"columns": columns, "actions": self._actions(columns)}

    def score(
        self, reading: Reading, state: Tensor, chosen: Chosen, valid: Tensor, old: Tensor | None
    ) -> dict[str, Tensor]:
        columns = chosen["columns"]
        found = hidden_logprob(
            self._read(reading, state, columns),
            self._weight,
            self.codec.ids(columns),
            temperature=self.temperature,
            columns=(self.codec.first, self.codec.vocabulary),
        )
        shape = (len(columns), self.settings.chunk, self.action_dim)
        return {
            "logp": self._by_level(found.logp.view(shape), valid),
            "entropy": self._by_level(found.entropy.view(shape), valid),
        }

    def teach(self, actions: Tensor, seeds: Sequence[int]) -> Chosen:
        return {"columns": self.codec.encode(actions).flatten(1), "actions": actions}

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
        if self.settings.decoding == "bidirectional":
            start = self.state(state)
            empty = start.new_zeros(len(state), self.tokens, self.width)
            found = cast(Together, reading).together(torch.cat([start, empty], 1))
            return found[:, start.shape[1] : -1]  # what stands before each place
        assert columns is not None
        first = rearrange(self._begin(reading, state), "n w -> n 1 w")
        if self.tokens == 1:
            return first
        return torch.cat([first, extend(reading, self._embed(columns[:, :-1]))], 1)

    def _embed(self, columns: Tensor) -> Tensor:
        embeddings: nn.Module = self._backbone[0].input_embeddings  # type: ignore[assignment]
        return embeddings(self.codec.ids(columns))

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._weight[self.codec.first : self.codec.vocabulary]).float()

    @property
    def _weight(self) -> Tensor:
        return self._backbone[0].output_weight  # type: ignore[return-value]

    def _actions(self, columns: Tensor) -> Tensor:
        return self.codec.decode(columns).view(-1, self.settings.chunk, self.action_dim)


class LaplaceHead(Head):
    """Actions with a median and a learned scale (RIPT-VLA, arXiv 2505.17016)."""

    def __init__(self, settings: Actions, action_dim: int, state_dim: int, width: int) -> None:
        super().__init__(settings, action_dim, state_dim, width)
        self.log_scale = nn.Parameter(torch.full((settings.chunk, action_dim), math.log(settings.scale)))

    def median(self, reading: Reading, state: Tensor) -> Tensor:
        """[n, chunk, action]"""
        raise NotImplementedError

    def act(self, reading: Reading, state: Tensor, seeds: Sequence[int], temperature: float, training: bool) -> Chosen:
        median = self.median(reading, state).float()
        uniform = torch.stack(
            [torch.rand(median.shape[1:], generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        ).to(median.device)
        centred = (uniform - 0.5).clamp(-0.5 + CLIP, 0.5 - CLIP)
        noise = -centred.sign() * torch.log1p(-2 * centred.abs())
        return {"actions": median + temperature * self.log_scale.float().exp() * noise}

    def score(
        self, reading: Reading, state: Tensor, chosen: Chosen, valid: Tensor, old: Tensor | None
    ) -> dict[str, Tensor]:
        median, log_scale = self.median(reading, state).float(), self.log_scale.float()
        logp = -(chosen["actions"] - median).abs() / log_scale.exp() - log_scale - math.log(2)
        entropy = (1 + math.log(2) + log_scale).expand_as(logp)
        return {"logp": self._by_level(logp, valid), "entropy": self._by_level(entropy, valid)}


class RegressionHead(LaplaceHead):
    """One query an action, read by an MLP (OpenVLA-OFT, arXiv 2502.19645, with one token an action)."""

    def __init__(self, settings: Actions, action_dim: int, state_dim: int, width: int) -> None:
        super().__init__(settings, action_dim, state_dim, width)
        self.state = StateToken(self.state_dim, width)
        self.queries = nn.Parameter(torch.randn(settings.chunk, width) * 0.02)
        self.leave = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, action_dim))

    def median(self, reading: Reading, state: Tensor) -> Tensor:
        start = self.state(state)
        asked = torch.cat([start, repeat(self.queries, "c w -> n c w", n=len(state))], 1)
        return self.leave(extend(reading, asked)[:, start.shape[1] :])


class BridgeHead(LaplaceHead):
    """Queries are read from every layer, and so is the prompt: see `BridgeBlock`."""

    every_layer = True

    def __init__(self, settings: Actions, action_dim: int, state_dim: int, width: int) -> None:
        super().__init__(settings, action_dim, state_dim, width)
        own = settings.width
        self.state = StateToken(self.state_dim, width)
        self.queries = nn.Parameter(torch.randn(settings.queries, width) * 0.02)
        self.start = nn.Parameter(torch.randn(settings.chunk, own) * 0.02)
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


class FlowHead(Head):
    """Denoises a chunk: velocities of a flow from noise (sigma 1) to actions (sigma 0).

    With likelihood "chain" a decision is a step of the sampler inside the window, one sigma-level Gaussian of the whole
    chunk. With "matching" the chunk is one decision whose log-ratio is the fall of the flow-matching error (FPO, arXiv
    2507.21053). `latent` is what is denoised, [chunk, action] or more on either side; only the chunk's own actions are
    executed, and only they count.
    """

    context_only = True

    def __init__(
        self,
        settings: Actions,
        denoising: Denoising,
        action_dim: int,
        state_dim: int,
        width: int,
        supervised: bool,
        latent: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(settings, action_dim, state_dim, width)
        self.denoising = denoising
        self.shape = (settings.chunk, action_dim)
        self.latent = latent or self.shape
        self.likelihood: str = "matching" if supervised else denoising.likelihood
        self.sampler = Sampler(grid(denoising.steps), denoising.transition, denoising.noise)
        self.careful = Sampler(grid(denoising.evaluation_steps), "ode", 0.0)

    def velocity(self, reading: Reading, state: Tensor, x: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        """Of noisy chunks x [m, *latent] at noise levels sigma [m], each for the observation in `rows` [m]; like x."""
        raise NotImplementedError

    @property
    def decisions(self) -> int:
        return len(self._window(0)) if self.likelihood == "chain" else 1

    def _window(self, seed: int) -> list[int]:
        return self.denoising.window.steps(self.sampler.std, 0, seed)

    def act(self, reading: Reading, state: Tensor, seeds: Sequence[int], temperature: float, training: bool) -> Chosen:
        x = gaussian(list(seeds), INITIAL, self.latent).to(state.device)
        drawn = self.likelihood == "chain" and temperature > 0 and training
        windows = [self._window(seed) if drawn else [] for seed in seeds]
        sampler = self.sampler if training else self.careful

        def predict(x: Tensor, point: Tensor, rows: Tensor) -> Tensor:
            return self.velocity(reading, state, x, sampler.grid.sigmas[point].to(x.device), rows.to(x.device))

        def noise(step: int, rows: Tensor) -> Tensor:
            return gaussian([seeds[i] for i in rows.tolist()], step, self.latent)

        chain = run(predict, x, sampler, windows, noise)
        chosen = {"actions": self._executed(chain.final)}
        if self.likelihood == "matching":
            return {**chosen, "data": chain.final, **self._levels(seeds)}
        if drawn:
            chosen |= {"points": torch.tensor(windows), "x": chain.x, "x_next": chain.x_next}
        return chosen

    def score(
        self, reading: Reading, state: Tensor, chosen: Chosen, valid: Tensor, old: Tensor | None
    ) -> dict[str, Tensor]:
        by_likelihood = {"chain": self._score_chain, "matching": self._score_matching}
        return by_likelihood[self.likelihood](reading, state, chosen, valid, old)

    def _score_chain(
        self, reading: Reading, state: Tensor, chosen: Chosen, valid: Tensor, old: Tensor | None
    ) -> dict[str, Tensor]:
        """All steps of the window in one pass of the expert."""
        n, w = chosen["points"].shape
        points = chosen["points"].flatten()
        x, x_next = (rearrange(chosen[key], "n w c a -> (n w) c a") for key in ("x", "x_next"))
        v = self._executed(self._velocity(reading, state, x, self.sampler.grid.sigmas[points.cpu()], w))
        x, x_next = self._executed(x), self._executed(x_next)
        before = v.detach() if old is None else rearrange(old, "n w c a -> (n w) c a")
        executed = repeat(valid, "n c -> (n w) c 1", w=w)
        v = v.where(executed, before)  # actions that were never executed: equal under both, without gradient
        step = self.sampler.at(points.cpu(), points.cpu() + 1, torch.ones(n * w, dtype=torch.bool))
        how = self.denoising.reduction
        mean, _, _ = gaussian_step(x, before, step, noise=torch.zeros_like(x), keep_mean=False)
        seen = x_next.where(executed, mean)
        compared = compare_steps(x, v, before, step, seen, reduction=how)
        return {
            "logp": compared.logp.view(n, w),
            "log_ratio": compared.log_ratio.view(n, w),
            "divergence": compared.kl.detach().view(n, w),
            "std": step.std.to(x.device).view(n, w),
            "prediction": v.detach().view(n, w, *self.shape),
        }

    def _score_matching(
        self, reading: Reading, state: Tensor, chosen: Chosen, valid: Tensor, old: Tensor | None
    ) -> dict[str, Tensor]:
        sigma, noise = chosen["sigma"], chosen["noise"]  # [n, draw], [n, draw, chunk, action]
        n, m = sigma.shape
        data = chosen["data"][:, None]
        s = sigma[..., None, None]
        x, target = (1 - s) * data + s * noise, noise - data
        v = self._velocity(reading, state, rearrange(x, "n m c a -> (n m) c a"), sigma.flatten(), m)
        v, target = self._executed(v.view(n, m, *self.latent)), self._executed(target)
        before = v.detach() if old is None else old[:, 0]
        executed = valid[:, None, :, None]

        def error(values: Tensor) -> Tensor:
            mean = reduce_elements(values.where(executed, 0).flatten(0, 1), self.denoising.reduction).view(n, m)
            return mean.mean(1, keepdim=True)

        return {
            "logp": -error((v - target).square()),
            # With both at hand the difference of squares has a form that is exactly 0 on-policy.
            "log_ratio": -error((v - before) * (v + before - 2 * target)),
            "prediction": v.detach()[:, None],
        }

    def _velocity(self, reading: Reading, state: Tensor, x: Tensor, sigma: Tensor, times: int) -> Tensor:
        """Of `times` noisy chunks an observation, in one pass."""
        rows = torch.arange(len(state), device=x.device).repeat_interleave(times)
        return self.velocity(reading, state, x, sigma.to(x.device), rows)

    def _executed(self, latent: Tensor) -> Tensor:
        """[..., *latent] -> [..., chunk, action]"""
        return latent[..., : self.shape[0], : self.shape[1]].contiguous()

    def teach(self, actions: Tensor, seeds: Sequence[int]) -> Chosen:
        """What the chunk does not say of a latent: further actions like the last, no further numbers."""
        longer, wider = (inner - outer for inner, outer in zip(self.latent, self.shape, strict=True))
        data = torch.cat([actions, actions[:, -1:].expand(-1, longer, -1)], 1)
        return {"actions": actions, "data": F.pad(data, (0, wider)), **self._levels(seeds)}

    def _levels(self, seeds: Sequence[int]) -> Chosen:
        """Noise levels and noises, the same whenever a chunk is scored. Levels are Beta(1.5, 1), as pi0 draws them:
        more of them where noise prevails."""
        m = self.denoising.draws
        sigmas, noises = [], []
        for seed in seeds:
            generator = torch.Generator().manual_seed(mixed(seed, 1000))
            uniform = (torch.arange(m) + torch.rand(m, generator=generator)) / m
            sigmas.append(0.001 + 0.999 * uniform ** (2 / 3))
            noises.append(torch.stack([gaussian([seed], DRAWS - j, self.latent)[0] for j in range(m)]))
        return {"sigma": torch.stack(sigmas), "noise": torch.stack(noises)}


class ExpertHead(FlowHead):
    """A flow head with an expert of its own, which looks at the prompt's last layer (as pi0, arXiv 2410.24164). With
    spread "learned" a network says how wide each step is, and all steps together are one decision (ReinFlow, arXiv
    2505.22094)."""

    def __init__(
        self, settings: Actions, denoising: Denoising, action_dim: int, state_dim: int, width: int, supervised: bool
    ) -> None:
        super().__init__(settings, denoising, action_dim, state_dim, width, supervised)
        learned = settings.spread == "learned"
        self.expert = Expert(*self.shape, self.state_dim, width, settings.width, settings.depth, learned)
        if learned and not supervised:
            self.likelihood = "joint"

    def velocity(self, reading: Reading, state: Tensor, x: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        return self._ask(reading, state, x, sigma, rows)[0].float()

    def act(self, reading: Reading, state: Tensor, seeds: Sequence[int], temperature: float, training: bool) -> Chosen:
        if self.likelihood == "joint" and temperature > 0:
            return self._act_joint(reading, state, seeds)
        return super().act(reading, state, seeds, temperature, training)

    def score(
        self, reading: Reading, state: Tensor, chosen: Chosen, valid: Tensor, old: Tensor | None
    ) -> dict[str, Tensor]:
        if self.likelihood == "joint":
            return self._score_joint(reading, state, chosen, valid)
        return super().score(reading, state, chosen, valid, old)

    def _ask(
        self, reading: Reading, state: Tensor, x: Tensor, sigma: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        return self.expert(x, sigma, state[rows], reading.hidden[rows], reading.mask[rows].bool())

    def _act_joint(self, reading: Reading, state: Tensor, seeds: Sequence[int]) -> Chosen:
        x = gaussian(list(seeds), INITIAL, self.shape).to(state.device)
        rows = torch.arange(len(x), device=x.device)
        sigmas, chain = self.sampler.grid.sigmas, [x]
        for k in range(len(self.sampler.grid)):
            point = torch.full((len(x),), k)
            mean, std = self._learned_step(reading, state, chain[-1], point, rows)
            chain.append(mean + std * gaussian(list(seeds), k, self.shape).to(x.device))
        assert len(chain) == len(sigmas)
        return {"actions": chain[-1], "chain": torch.stack(chain, 1)}

    def _learned_step(
        self, reading: Reading, state: Tensor, x: Tensor, point: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Mean and std, like x, of the steps from grid points `point` [n]: Euler's mean, the network's std."""
        sigmas = self.sampler.grid.sigmas
        v, wide = self._ask(reading, state, x, sigmas[point].to(x.device), rows)
        assert wide is not None
        dt = (sigmas[point + 1] - sigmas[point]).to(x.device)[:, None, None]
        low, high = (math.log(bound) for bound in self.settings.spread_range)
        return x + dt * v.float(), torch.exp(low + (wide.float() + 1) / 2 * (high - low))

    def _score_joint(self, reading: Reading, state: Tensor, chosen: Chosen, valid: Tensor) -> dict[str, Tensor]:
        chain = chosen["chain"]
        n, k = len(chain), chain.shape[1] - 1
        x, x_next = (rearrange(part, "n k c a -> (n k) c a") for part in (chain[:, :-1], chain[:, 1:]))
        point = torch.arange(k).repeat(n)
        rows = torch.arange(n, device=x.device).repeat_interleave(k)
        mean, std = self._learned_step(reading, state, x, point, rows)
        executed = repeat(valid, "n c -> (n k) c 1", k=k)
        logp = -((x_next - mean) / std).square() / 2 - std.log() - 0.5 * math.log(2 * math.pi)
        entropy = std.log() + 0.5 * math.log(2 * math.pi * math.e)

        def together(values: Tensor) -> Tensor:
            rows = reduce_elements(values.where(executed, 0), self.denoising.reduction).view(n, k)
            return (rows.mean(1) if self.denoising.reduction == "mean" else rows.sum(1))[:, None]

        return {"logp": together(logp), "entropy": together(entropy)}


def grid(steps: int) -> Grid:
    sigmas = linear(steps)
    return Grid(sigmas, sigmas[:-1])


def extend(reading: Reading, embeddings: Tensor) -> Tensor:
    return reading.extend(embeddings, torch.ones(embeddings.shape[:2], dtype=torch.long, device=embeddings.device))
