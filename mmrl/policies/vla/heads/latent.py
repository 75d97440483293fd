"""A head that draws latents one after the other before it acts, which are decisions like actions."""

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
    """At most K latents of Z numbers, each a Gaussian whose mean is a perceptron of the prompt's last token, the
    robot's state and the latents before it; after each but the last one a Bernoulli decision to exit; then actions
    around a mean that reads the latents too (after AVA-VLA).

    Decisions of a chunk, in order: latent 1, exit 1, latent 2, exit 2, ..., latent K, and those of the actions. Latents
    after an exit are not drawn and do not count: networks read zeros in their place, and the number of latents.

    Demonstrations show actions and no latents. Only the actions' likelihood is learned from, given latents that the
    policy draws while it is scored, with noise from `teach`, so that the gradient goes through them: its mean is a
    lower bound of log p(actions) (Jensen's inequality). The number of latents is drawn uniformly from 1 to K, so that
    the actions fit whenever reasoning ends; exits are not trained.
    """

    context_only = True
    reasons = True

    def __init__(self, settings: LatentActions, action: Actions, action_dim: int, state_dim: int, width: int) -> None:
        """width: of the backbone, 0 where it reads nothing."""
        super().__init__(settings, action, action_dim, state_dim)
        self.steps, self.latent, self.std = settings.steps, settings.latent, settings.latent_std
        self.exits = settings.steps - 1 if settings.early_exit else 0
        inputs = width + self.state_dim + self.steps * (self.latent + 1)
        sizes = [inputs, *[settings.width] * settings.layers]
        self.reason = perceptron(sizes, self.latent)
        self.layers = perceptron(sizes, math.prod(self.shape), last_gain=settings.last_gain)
        if self.exits:
            self.leave = perceptron(sizes, 1, last_gain=settings.last_gain)
            log_odds = math.log(settings.exit_chance) - math.log1p(-settings.exit_chance)
            nn.init.constant_(self.leave[-1].get_parameter("bias"), log_odds)

    @property
    def decisions(self) -> int:
        return self.steps + self.exits + super().decisions

    def act(self, reading: Reading, state: Tensor, sampling: ActionSampling) -> Chosen:
        """Draws latents, exits and actions; after an exit no further latent is computed. At temperature 0 latents and
        actions are the means, with an exit where its probability is above 0.5."""
        context = self._context(reading, state)
        drawn = [self._randomness(seed) for seed in sampling.seeds]
        noise, uniform, last = (torch.stack(part).to(context.device) for part in zip(*drawn, strict=True))
        latents, count = torch.zeros_like(noise), torch.full((len(noise),), self.steps, device=context.device)
        active = torch.arange(len(noise), device=context.device)
        for k in range(self.steps):
            mean = self._latent_mean(context[active], latents[active, :k])
            latents[active, k] = mean + sampling.temperature * self.std * noise[active, k]
            if k >= self.exits:
                continue
            logit = self._exit_logit(context[active], latents[active, : k + 1])
            exit_probability = (logit / (sampling.temperature or 1.0)).sigmoid()
            exits = exit_probability > (uniform[active, k] if sampling.temperature else 0.5)
            count[active[exits]] = k + 1
            active = active[~exits]
            if not len(active):
                break
        mean = self._action_mean(context, latents, self._drawn_mask(count))
        return {
            "latents": latents,
            "count": count,
            "taught": torch.zeros_like(count, dtype=torch.bool),
            "actions": mean + sampling.temperature * self.spread().exp() * last,
            "temperature": self._temperature(sampling),
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
        latent, exit_, action = distributions = self._distributions(self._context(reading, state), chosen)
        exits = chosen["count"][:, None] == 1 + torch.arange(self.exits, device=exit_.device)
        fields = {
            "logp": (
                gaussian_logp(self._chosen_latents(chosen), *latent.unbind(-1)),
                F.logsigmoid(exit_.where(exits, -exit_)),
                gaussian_logp(chosen["actions"], *action.unbind(-1)),
            ),
            "entropy": (gaussian_entropy(latent[..., 1]), bernoulli_entropy(exit_), gaussian_entropy(action[..., 1])),
        }
        for name, other in (("divergence", old), ("reference_kl", reference)):
            if other is not None:
                other_parts = self._unpacked(other)
                fields[name] = (
                    gaussian_divergence(other_parts[0], latent),
                    bernoulli_divergence(other_parts[1], exit_),
                    gaussian_divergence(other_parts[2], action),
                )
        counts = self.decided(valid, chosen)
        summed = {
            name: self._in_order(of_latents.sum(-1), of_exits, self._by_level(of_actions, valid)).where(counts, 0)
            for name, (of_latents, of_exits, of_actions) in fields.items()
        }
        return {**summed, "prediction": self._packed(*distributions).detach()}

    def teach(self, actions: Tensor, seeds: Sequence[int]) -> Chosen:
        """Returns as "latents" the noise of the latents that the policy draws while it is scored."""
        noise, count = [], []
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            noise.append(torch.randn(self.steps, self.latent, generator=generator))
            count.append(torch.randint(1, self.steps + 1, (), generator=generator))
        taught = torch.ones(len(noise), dtype=torch.bool)
        latents = {"latents": torch.stack(noise), "count": torch.stack(count), "taught": taught}
        return {**super().teach(actions, seeds), **latents}

    def decided(self, valid: Tensor, chosen: Chosen) -> Tensor:
        drawn = self._drawn_mask(chosen["count"]) & (valid.any(1) & ~chosen["taught"])[:, None]
        return self._in_order(drawn, drawn[:, : self.exits], super().decided(valid, chosen))

    def reasoning_steps(self, chosen: Chosen) -> Tensor:
        return chosen["count"]

    # --- reasoning ---

    def _randomness(self, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draws the random numbers of one chunk: noise of all latents [K, Z], uniform numbers for the exits
        [K - 1 or 0], and noise of the actions [chunk, action]. All are drawn even where reasoning ends early."""
        generator = torch.Generator().manual_seed(seed)
        noise, uniform = (
            torch.randn(self.steps, self.latent, generator=generator),
            torch.rand(self.exits, generator=generator),
        )
        return noise, uniform, torch.randn(self.shape, generator=generator)

    def _drawn_mask(self, count: Tensor) -> Tensor:
        """Returns which latents were drawn, the first count [n] of them, [n, K] bool."""
        return torch.arange(self.steps, device=count.device) < count[:, None]

    def _chosen_latents(self, chosen: Chosen) -> Tensor:
        """Returns the drawn latents or, for demonstrations, their noise [n, K, Z]; 0 where there are none."""
        return chosen["latents"].where(self._drawn_mask(chosen["count"])[..., None], 0)

    def _distributions(self, context: Tensor, chosen: Chosen) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the distribution of every decision given those before it: mean and log standard deviation of latents
        [n, K, Z, 2], log-odds of exits [n, K - 1 or 0], mean and log standard deviation of actions [n, chunk, action,
        2]; fp32."""
        chosen_latents, taught, mask = (
            self._chosen_latents(chosen),
            chosen["taught"][:, None],
            self._drawn_mask(chosen["count"]),
        )
        means: list[Tensor] = []
        latents = chosen_latents[:, :0]
        for k in range(self.steps):
            means.append(self._latent_mean(context, latents))
            drawn = means[k] + self.std * chosen_latents[:, k]
            latents = torch.cat([latents, drawn.where(taught, chosen_latents[:, k])[:, None]], 1)
        logits = [self._exit_logit(context, latents[:, : k + 1]) for k in range(self.exits)]
        action = self._action_mean(context, latents.where(mask[..., None], 0), mask)
        temperature = chosen["temperature"].float()[:, None]
        log_std = (math.log(self.std) + temperature.log())[..., None].expand_as(chosen_latents)
        log_spread = (self.spread() + temperature.log()[..., None]).expand_as(action)
        return (
            torch.stack([torch.stack(means, 1), log_std], -1),
            (torch.stack(logits, 1) if logits else context.new_zeros(len(context), 0).float()) / temperature,
            torch.stack([action, log_spread], -1),
        )

    def _latent_mean(self, context: Tensor, latents: Tensor) -> Tensor:
        """Returns the mean of the next latent after latents [n, k, Z]: [n, Z] fp32."""
        return self.reason(self._network_input(context, latents)).float()

    def _exit_logit(self, context: Tensor, latents: Tensor) -> Tensor:
        """Returns the log-odds of an exit after latents [n, k, Z]: [n] fp32."""
        return self.leave(self._network_input(context, latents))[:, 0].float()

    def _action_mean(self, context: Tensor, latents: Tensor, mask: Tensor) -> Tensor:
        """Returns the mean of actions [n, chunk, action] fp32. latents: [n, K, Z], 0 where mask [n, K] is False."""
        inputs = torch.cat([context, latents.flatten(1).to(context), mask.to(context)], 1)
        return self.layers(inputs).float().view(-1, *self.shape)

    def _network_input(self, context: Tensor, latents: Tensor) -> Tensor:
        """Returns the input of the networks after latents [n, k, Z], in the format of `_action_mean`."""
        padding = self.steps - latents.shape[1]
        mask = F.pad(torch.ones_like(latents[:, :, 0]), (0, padding))
        return torch.cat([context, F.pad(latents, (0, 0, 0, padding)).flatten(1).to(context), mask.to(context)], 1)

    def _context(self, reading: Reading, state: Tensor) -> Tensor:
        return reading.last if self.state_dim == 0 else torch.cat([reading.last, state.to(reading.last)], 1)

    # --- decisions of three kinds in one tensor ---

    def _in_order(self, latents: Tensor, exits: Tensor, actions: Tensor) -> Tensor:
        """Interleaves latents [n, K, ...], exits [n, K - 1 or 0, ...] and actions [n, decision, ...] in the order of
        decisions, [n, decisions, ...]."""
        if self.exits == 0:
            return torch.cat([latents, actions], 1)
        alternate = torch.stack([latents[:, :-1], exits], 2).flatten(1, 2)
        return torch.cat([alternate, latents[:, -1:], actions], 1)

    def _packed(self, latents: Tensor, exits: Tensor, actions: Tensor) -> Tensor:
        """Packs mean and log standard deviation of latents [n, K, Z, 2] and of actions [n, chunk, action, 2], and
        log-odds of exits into [n, decisions, number, 2], padded with zeros."""
        by_decision = actions.view(len(actions), super().decisions, -1, 2)
        size = max(self.latent, by_decision.shape[2])
        exits = F.pad(exits[..., None, None], (0, 1, 0, size - 1))
        latents, by_decision = (F.pad(part, (0, 0, 0, size - part.shape[2])) for part in (latents, by_decision))
        return self._in_order(latents, exits, by_decision)

    def _unpacked(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the inputs of `_packed`."""
        reasoning, actions = packed.split([self.steps + self.exits, super().decisions], 1)
        stride = 2 if self.exits else 1
        size = math.prod(self.shape) // super().decisions
        return (
            reasoning[:, ::stride, : self.latent],
            reasoning[:, 1::stride, 0, 0][:, : self.exits],
            actions[:, :, :size].reshape(len(packed), *self.shape, 2),
        )


def bernoulli_entropy(logit: Tensor) -> Tensor:
    return -logit.sigmoid() * F.logsigmoid(logit) - (-logit).sigmoid() * F.logsigmoid(-logit)


def bernoulli_divergence(a: Tensor, b: Tensor) -> Tensor:
    """Returns KL(a || b) of Bernoulli distributions by their log-odds, [...]."""
    yes = a.sigmoid() * (F.logsigmoid(a) - F.logsigmoid(b))
    return yes + (-a).sigmoid() * (F.logsigmoid(-a) - F.logsigmoid(-b))
