"""A head that reasons before it acts: latents drawn one after the other, which are decisions as actions are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmrl.policies.vla.heads.gaussian import SpreadHead, gaussian_divergence, gaussian_entropy, gaussian_logp
from mmrl.policies.vla.heads.head import ActionSampling, Chosen, Reading
from mmrl.policies.vla.heads.perceptron import perceptron
from mmrl.policies.vla.settings import Actions, LatentActions


class LatentHead(SpreadHead):
    """At most K latents of Z numbers, each a Gaussian around what a perceptron makes of the prompt's last token, the
    robot's state and the latents before it; after each but the last one a yes or no to "that is enough"; then actions
    around a mean that reads the latents too (after AVA-VLA).

    Decisions of a chunk, in the order in which they are made: latent 1, exit 1, latent 2, exit 2, ..., latent K, and
    those of the actions. What would have come behind an exit was not made and counts for nothing: networks see zeros in
    its place, and how many latents there are.

    Demonstrations show actions and no latents. Only the actions' likelihood is learned from, given latents that the
    policy draws while it is scored, with noise from `teach`, so that the gradient goes through them: its mean is a
    lower bound of log p(actions) (Jensen's inequality). How many latents there are is drawn evenly from 1 to K, so that
    the actions fit whenever reasoning ends; exits stay as they are.
    """

    context_only = True
    reasons = True

    def __init__(self, settings: LatentActions, action: Actions, action_dim: int, state_dim: int, width: int) -> None:
        """width: of the backbone, 0 where it reads nothing."""
        super().__init__(settings, action, action_dim, state_dim)
        self.steps, self.latent, self.std = settings.steps, settings.latent, settings.latent_std
        self.exits = settings.steps - 1 if settings.early_exit else 0
        told = width + self.state_dim + self.steps * (self.latent + 1)
        sizes = [told, *[settings.width] * settings.layers]
        self.reason = perceptron(sizes, self.latent)
        self.layers = perceptron(sizes, math.prod(self.shape), last_gain=settings.last_gain)
        if self.exits:
            self.leave = perceptron(sizes, 1, last_gain=settings.last_gain)
            log_odds = math.log(settings.exit_chance) - math.log1p(-settings.exit_chance)
            nn.init.constant_(self.leave[-1].get_parameter("bias"), log_odds)

    @property
    def decisions(self) -> int:
        return self.steps + self.exits + super().decisions

    def act(self, reading: Reading, state: Tensor, how: ActionSampling) -> Chosen:
        """Of those that have ended reasoning no further latent is computed. The likeliest actions are those after the
        likeliest latents, with an exit where it is likelier than none."""
        context = self._context(reading, state)
        drawn = [self._randomness(seed) for seed in how.seeds]
        noise, uniform, last = (torch.stack(part).to(context.device) for part in zip(*drawn, strict=True))
        latents, count = torch.zeros_like(noise), torch.full((len(noise),), self.steps, device=context.device)
        going = torch.arange(len(noise), device=context.device)
        for k in range(self.steps):
            mean = self._latent_mean(context[going], latents[going, :k])
            latents[going, k] = mean + how.temperature * self.std * noise[going, k]
            if k >= self.exits:
                continue
            logit = self._exit_logit(context[going], latents[going, : k + 1])
            likely = (logit / (how.temperature or 1.0)).sigmoid()
            enough = likely > (uniform[going, k] if how.temperature else 0.5)
            count[going[enough]] = k + 1
            going = going[~enough]
            if not len(going):
                break
        mean = self._action_mean(context, latents, self._made(count))
        return {
            "latents": latents,
            "count": count,
            "taught": torch.zeros_like(count, dtype=torch.bool),
            "actions": mean + how.temperature * self.spread().exp() * last,
            "temperature": self._temperature(how),
        }

    def score(
        self,
        reading: Reading,
        state: Tensor,
        chosen: Chosen,
        valid: Tensor,
        old: Tensor | None,
        reference: Tensor | None,
    ) -> dict[str, Tensor]:
        latent, exit_, action = now = self._distributions(self._context(reading, state), chosen)
        enough = chosen["count"][:, None] == 1 + torch.arange(self.exits, device=exit_.device)
        found = {
            "logp": (
                gaussian_logp(self._given(chosen), *latent.unbind(-1)),
                F.logsigmoid(exit_.where(enough, -exit_)),
                gaussian_logp(chosen["actions"], *action.unbind(-1)),
            ),
            "entropy": (gaussian_entropy(latent[..., 1]), bernoulli_entropy(exit_), gaussian_entropy(action[..., 1])),
        }
        for name, other in (("divergence", old), ("reference_kl", reference)):
            if other is not None:
                then = self._unpacked(other)
                found[name] = (
                    gaussian_divergence(then[0], latent),
                    bernoulli_divergence(then[1], exit_),
                    gaussian_divergence(then[2], action),
                )
        counts = self.decided(valid, chosen)
        summed = {
            name: self._in_order(of_latents.sum(-1), of_exits, self._by_level(of_actions, valid)).where(counts, 0)
            for name, (of_latents, of_exits, of_actions) in found.items()
        }
        return {**summed, "prediction": self._packed(*now).detach()}

    def teach(self, actions: Tensor, seeds: Sequence[int]) -> Chosen:
        """As "latents" the noise of those that the policy draws while it is scored."""
        noise, count = [], []
        for seed in seeds:
            own = torch.Generator().manual_seed(seed)
            noise.append(torch.randn(self.steps, self.latent, generator=own))
            count.append(torch.randint(1, self.steps + 1, (), generator=own))
        taught = torch.ones(len(noise), dtype=torch.bool)
        told = {"latents": torch.stack(noise), "count": torch.stack(count), "taught": taught}
        return {**super().teach(actions, seeds), **told}

    def decided(self, valid: Tensor, chosen: Chosen) -> Tensor:
        drawn = self._made(chosen["count"]) & (valid.any(1) & ~chosen["taught"])[:, None]
        return self._in_order(drawn, drawn[:, : self.exits], super().decided(valid, chosen))

    def reasoning_steps(self, chosen: Chosen) -> Tensor:
        return chosen["count"]

    # --- reasoning ---

    def _randomness(self, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of one chunk: noise of all its latents [K, Z], of exits [K - 1 or 0] in 0 to 1, and of its actions [chunk,
        action]; all of it is drawn, whenever reasoning ends."""
        own = torch.Generator().manual_seed(seed)
        noise, uniform = torch.randn(self.steps, self.latent, generator=own), torch.rand(self.exits, generator=own)
        return noise, uniform, torch.randn(self.shape, generator=own)

    def _made(self, count: Tensor) -> Tensor:
        """[n, K] bool: which latents were drawn, where the first count [n] were."""
        return torch.arange(self.steps, device=count.device) < count[:, None]

    def _given(self, chosen: Chosen) -> Tensor:
        """The latents that were chosen or, of what is taught, their noise [n, K, Z]; 0 where there are none."""
        return chosen["latents"].where(self._made(chosen["count"])[..., None], 0)

    def _distributions(self, context: Tensor, chosen: Chosen) -> tuple[Tensor, Tensor, Tensor]:
        """Of every decision given those before it: mean and log standard deviation of latents [n, K, Z, 2], log-odds of
        exits [n, K - 1 or 0], mean and log standard deviation of actions [n, chunk, action, 2]; fp32."""
        given, taught, made = self._given(chosen), chosen["taught"][:, None], self._made(chosen["count"])
        means: list[Tensor] = []
        latents = given[:, :0]
        for k in range(self.steps):
            means.append(self._latent_mean(context, latents))
            drawn = means[k] + self.std * given[:, k]
            latents = torch.cat([latents, drawn.where(taught, given[:, k])[:, None]], 1)
        logits = [self._exit_logit(context, latents[:, : k + 1]) for k in range(self.exits)]
        action = self._action_mean(context, latents.where(made[..., None], 0), made)
        temperature = chosen["temperature"].float()[:, None]
        log_std = (math.log(self.std) + temperature.log())[..., None].expand_as(given)
        log_spread = (self.spread() + temperature.log()[..., None]).expand_as(action)
        return (
            torch.stack([torch.stack(means, 1), log_std], -1),
            (torch.stack(logits, 1) if logits else context.new_zeros(len(context), 0).float()) / temperature,
            torch.stack([action, log_spread], -1),
        )

    def _latent_mean(self, context: Tensor, latents: Tensor) -> Tensor:
        """Of the next latent after latents [n, k, Z]: [n, Z] fp32."""
        return self.reason(self._told(context, latents)).float()

    def _exit_logit(self, context: Tensor, latents: Tensor) -> Tensor:
        """Log-odds of ending after latents [n, k, Z]: [n] fp32."""
        return self.leave(self._told(context, latents))[:, 0].float()

    def _action_mean(self, context: Tensor, latents: Tensor, made: Tensor) -> Tensor:
        """[n, chunk, action] fp32. latents [n, K, Z], 0 where they were not made [n, K]."""
        told = torch.cat([context, latents.flatten(1).to(context), made.to(context)], 1)
        return self.layers(told).float().view(-1, *self.shape)

    def _told(self, context: Tensor, latents: Tensor) -> Tensor:
        """What networks are told where latents [n, k, Z] have been drawn: as `_action_mean` is."""
        left = self.steps - latents.shape[1]
        made = F.pad(torch.ones_like(latents[:, :, 0]), (0, left))
        return torch.cat([context, F.pad(latents, (0, 0, 0, left)).flatten(1).to(context), made.to(context)], 1)

    def _context(self, reading: Reading, state: Tensor) -> Tensor:
        return reading.last if self.state_dim == 0 else torch.cat([reading.last, state.to(reading.last)], 1)

    # --- decisions of three kinds in one tensor ---

    def _in_order(self, latents: Tensor, exits: Tensor, actions: Tensor) -> Tensor:
        """[n, K, ...], [n, K - 1 or 0, ...] and [n, decision, ...] as they are made, [n, decisions, ...]."""
        if self.exits == 0:
            return torch.cat([latents, actions], 1)
        alternate = torch.stack([latents[:, :-1], exits], 2).flatten(1, 2)
        return torch.cat([alternate, latents[:, -1:], actions], 1)

    def _packed(self, latents: Tensor, exits: Tensor, actions: Tensor) -> Tensor:
        """Mean and log standard deviation of latents [n, K, Z, 2] and of actions [n, chunk, action, 2], and log-odds of
        exits: [n, decisions, number, 2], filled up with zeros."""
        by_decision = actions.view(len(actions), super().decisions, -1, 2)
        most = max(self.latent, by_decision.shape[2])
        exits = F.pad(exits[..., None, None], (0, 1, 0, most - 1))
        latents, by_decision = (F.pad(part, (0, 0, 0, most - part.shape[2])) for part in (latents, by_decision))
        return self._in_order(latents, exits, by_decision)

    def _unpacked(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What `_packed` took."""
        reasoning, actions = packed.split([self.steps + self.exits, super().decisions], 1)
        every = 2 if self.exits else 1
        own = math.prod(self.shape) // super().decisions
        return (
            reasoning[:, ::every, : self.latent],
            reasoning[:, 1::every, 0, 0][:, : self.exits],
            actions[:, :, :own].reshape(len(packed), *self.shape, 2),
        )


def bernoulli_entropy(logit: Tensor) -> Tensor:
    return -logit.sigmoid() * F.logsigmoid(logit) - (-logit).sigmoid() * F.logsigmoid(-logit)


def bernoulli_divergence(a: Tensor, b: Tensor) -> Tensor:
    """KL(a || b) of yes or no by log-odds, [...]."""
    yes = a.sigmoid() * (F.logsigmoid(a) - F.logsigmoid(b))
    return yes + (-a).sigmoid() * (F.logsigmoid(-a) - F.logsigmoid(-b))
