"""A head that samples a sequence of latent vectors before a chunk of actions; latents are decisions as actions are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmrl.policies.vla.heads.gaussian import DiagonalGaussianHead, gaussian_divergence, gaussian_entropy, gaussian_logp
from mmrl.policies.vla.heads.gaussian_settings import LatentActions
from mmrl.policies.vla.heads.head import ActionSampling, EncodedPrefix, SampledChunks
from mmrl.policies.vla.heads.perceptron import perceptron
from mmrl.policies.vla.settings import Actions


class LatentHead(DiagonalGaussianHead):
    """Samples up to K latents of Z numbers, then a chunk of actions (after AVA-VLA).

    A latent is Gaussian; an MLP computes its mean from the last hidden state of the prefix's last token, the robot's
    state and the latents before it. After each latent but the last one a Bernoulli decision, the exit, may end the
    sequence. Actions are Gaussian around a mean that reads the latents too.

    The decisions of a chunk are, in order: latent 1, exit 1, latent 2, exit 2, ..., latent K, and the actions. Latents
    after an exit are not sampled and are masked. The networks read zeros in their place, and a mask of the sampled
    latents.

    Demonstrations have actions but no latents. So the policy samples latents while it scores a demonstration, with
    noise from `encode_demonstrations`, and the gradient of the actions' likelihood flows through them. The mean of this
    likelihood is a lower bound of log p(actions) (Jensen's inequality). The number of latents is uniform on 1 to K, so
    that the actions fit whenever the sequence ends. Exits are not trained by demonstrations.
    """

    last_layer_only = True
    samples_latents = True

    def __init__(self, settings: LatentActions, action: Actions, action_dim: int, state_dim: int, width: int) -> None:
        """width: size of the backbone's hidden states; 0 for a policy without a backbone."""
        super().__init__(settings, action, action_dim, state_dim)
        self.steps, self.latent_dim, self.latent_std = settings.steps, settings.latent, settings.latent_std
        self.exits = settings.steps - 1 if settings.early_exit else 0
        # the last summand: the latents that were sampled so far, each with a flag that says whether it exists
        inputs = width + self.state_dim + self.steps * (self.latent_dim + 1)
        sizes = [inputs, *[settings.width] * settings.layers]
        # Outputs: mean of the next latent (reason), mean of the actions (layers), logit of an exit (leave). These are
        # names of parameters in saved policies.
        self.reason = perceptron(sizes, self.latent_dim)
        self.layers = perceptron(sizes, math.prod(self.shape), last_gain=settings.last_gain)
        if self.exits:
            self.leave = perceptron(sizes, 1, last_gain=settings.last_gain)
            log_odds = math.log(settings.exit_chance) - math.log1p(-settings.exit_chance)
            nn.init.constant_(self.leave[-1].get_parameter("bias"), log_odds)

    @property
    def decisions(self) -> int:
        return self.steps + self.exits + super().decisions

    def act(self, prefix: EncodedPrefix, state: Tensor, sampling: ActionSampling) -> SampledChunks:
        """Samples latents, exits and actions; after an exit no further latent is computed.

        At temperature 0 latents and actions are the means, and an exit happens if its probability is above 0.5."""
        context = self._context(prefix, state)
        random_numbers = zip(*(self._random_numbers(seed) for seed in sampling.seeds), strict=True)
        noise, uniform, action_noise = (torch.stack(rows).to(context.device) for rows in random_numbers)
        latents, count = torch.zeros_like(noise), torch.full((len(noise),), self.steps, device=context.device)
        active = torch.arange(len(noise), device=context.device)  # rows whose latents have not ended
        for k in range(self.steps):
            mean = self._latent_mean(context[active], latents[active, :k])
            latents[active, k] = mean + sampling.temperature * self.latent_std * noise[active, k]
            if k >= self.exits:
                continue
            logit = self._exit_logit(context[active], latents[active, : k + 1])
            exit_probability = (logit / (sampling.temperature or 1.0)).sigmoid()
            exits = exit_probability > (uniform[active, k] if sampling.temperature else 0.5)
            count[active[exits]] = k + 1
            active = active[~exits]
            if not len(active):
                break
        mean = self._action_mean(context, latents, self._latent_mask(count))
        return {
            "latents": latents,
            "count": count,
            "demonstrated": torch.zeros_like(count, dtype=torch.bool),
            "actions": mean + sampling.temperature * self.clamped_log_std().exp() * action_noise,
            "temperature": self._temperature(sampling),
        }

    def score(
        self,
        prefix: EncodedPrefix,
        state: Tensor,
        sampled: SampledChunks,
        valid: Tensor,
        old: Tensor | None,
        reference: Tensor | None,
    ) -> dict[str, Tensor]:
        """Scores latents, exits and actions; see `Head.score` and the class for the order of decisions."""
        # Each field below is a tuple of three tensors: for latents, for exits and for actions.
        latent, exit_logit, action = distributions = self._distributions(self._context(prefix, state), sampled)
        # [n, K - 1 or 0] bool: exit k (from 0) was taken if k + 1 latents were sampled
        exits = sampled["count"][:, None] == 1 + torch.arange(self.exits, device=exit_logit.device)
        fields = {
            "logp": (
                gaussian_logp(self._sampled_latents(sampled), *latent.unbind(-1)),
                F.logsigmoid(exit_logit.where(exits, -exit_logit)),  # log p of no exit is logsigmoid(-logit)
                gaussian_logp(sampled["actions"], *action.unbind(-1)),
            ),
            "entropy": (
                gaussian_entropy(latent[..., 1]),
                bernoulli_entropy(exit_logit),
                gaussian_entropy(action[..., 1]),
            ),
        }
        for name, prediction in (("divergence", old), ("reference_kl", reference)):
            if prediction is not None:
                other_parts = self._unpacked(prediction)
                fields[name] = (
                    gaussian_divergence(other_parts[0], latent),
                    bernoulli_divergence(other_parts[1], exit_logit),
                    gaussian_divergence(other_parts[2], action),
                )
        mask = self.decision_mask(valid, sampled)
        by_decision = {
            name: self._in_order(of_latents.sum(-1), of_exits, self._by_level(of_actions, valid)).where(mask, 0)
            for name, (of_latents, of_exits, of_actions) in fields.items()
        }
        return {**by_decision, "prediction": self._packed(*distributions).detach()}

    def encode_demonstrations(self, actions: Tensor, seeds: Sequence[int]) -> SampledChunks:
        """Returns the actions and what `score` needs to sample the latents of demonstrations, which are not known: as
        "latents" their noise, and as "count" a random number of latents. "demonstrated" marks these chunks."""
        noise, count = [], []
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            noise.append(torch.randn(self.steps, self.latent_dim, generator=generator))
            count.append(torch.randint(1, self.steps + 1, (), generator=generator))
        demonstrated = torch.ones(len(noise), dtype=torch.bool)
        latents = {"latents": torch.stack(noise), "count": torch.stack(count), "demonstrated": demonstrated}
        return {**super().encode_demonstrations(actions, seeds), **latents}

    def decision_mask(self, valid: Tensor, sampled: SampledChunks) -> Tensor:
        """Returns which decisions are trained on, [n, decisions] bool: executed actions, and (not in demonstrations)
        the sampled latents, each with the decision to exit that follows it."""
        mask = self._latent_mask(sampled["count"]) & (valid.any(1) & ~sampled["demonstrated"])[:, None]
        exit_mask = mask[:, : self.exits]  # a decision to exit follows each latent but the last possible one
        return self._in_order(mask, exit_mask, super().decision_mask(valid, sampled))

    def num_latents(self, sampled: SampledChunks) -> Tensor:
        return sampled["count"]

    # --- latents ---

    def _random_numbers(self, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Samples the random numbers of one chunk: noise of K latents [K, Z], uniform numbers that decide after each
        latent but the last whether to stop [K - 1, or 0 where all are sampled], and noise of the actions [chunk,
        action]. All are sampled even if the latents end early, so that the noise of the actions depends on the seed
        alone."""
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(self.steps, self.latent_dim, generator=generator)
        uniform = torch.rand(self.exits, generator=generator)
        return noise, uniform, torch.randn(self.shape, generator=generator)

    def _latent_mask(self, count: Tensor) -> Tensor:
        """Returns which latents were sampled: the first count [n] of each row, [n, K] bool."""
        return torch.arange(self.steps, device=count.device) < count[:, None]

    def _sampled_latents(self, sampled: SampledChunks) -> Tensor:
        """Returns the sampled latents or, for demonstrations, their noise, [n, K, Z]; 0 after an exit."""
        return sampled["latents"].where(self._latent_mask(sampled["count"])[..., None], 0)

    def _distributions(self, context: Tensor, sampled: SampledChunks) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the distribution of each decision given those before it, fp32: mean and log standard deviation of
        latents [n, K, Z, 2], logits of exits [n, K - 1 or 0], and mean and log standard deviation of actions [n, chunk,
        action, 2]. For demonstrations, whose "latents" are noise, the latents are sampled here."""
        sampled_latents, demonstrated, mask = (
            self._sampled_latents(sampled),
            sampled["demonstrated"][:, None],
            self._latent_mask(sampled["count"]),
        )
        means: list[Tensor] = []
        latents = sampled_latents[:, :0]
        for k in range(self.steps):
            means.append(self._latent_mean(context, latents))
            resampled = means[k] + self.latent_std * sampled_latents[:, k]
            latents = torch.cat([latents, resampled.where(demonstrated, sampled_latents[:, k])[:, None]], 1)
        logits = [self._exit_logit(context, latents[:, : k + 1]) for k in range(self.exits)]
        action = self._action_mean(context, latents.where(mask[..., None], 0), mask)
        temperature = sampled["temperature"].float()[:, None]
        log_std = (math.log(self.latent_std) + temperature.log())[..., None].expand_as(sampled_latents)
        action_log_std = (self.clamped_log_std() + temperature.log()[..., None]).expand_as(action)
        return (
            torch.stack([torch.stack(means, 1), log_std], -1),
            (torch.stack(logits, 1) if logits else context.new_zeros(len(context), 0).float()) / temperature,
            torch.stack([action, action_log_std], -1),
        )

    def _latent_mean(self, context: Tensor, latents: Tensor) -> Tensor:
        """Returns the mean of the latent that follows latents [n, k, Z]: [n, Z] fp32."""
        return self.reason(self._network_input(context, latents)).float()

    def _exit_logit(self, context: Tensor, latents: Tensor) -> Tensor:
        """Returns the logit of an exit after latents [n, k, Z]: [n] fp32."""
        return self.leave(self._network_input(context, latents))[:, 0].float()

    def _action_mean(self, context: Tensor, latents: Tensor, mask: Tensor) -> Tensor:
        """Returns the mean of the actions, [n, chunk, action] fp32. latents: [n, K, Z], 0 where mask [n, K] is
        False."""
        inputs = torch.cat([context, latents.flatten(1).to(context), mask.to(context)], 1)
        return self.layers(inputs).float().view(-1, *self.shape)

    def _network_input(self, context: Tensor, latents: Tensor) -> Tensor:
        """Concatenates context, latents [n, k, Z] padded to K, and the mask of sampled latents, as `_action_mean`
        does: [n, width + state + K x (Z + 1)]."""
        padding = self.steps - latents.shape[1]
        mask = F.pad(torch.ones_like(latents[:, :, 0]), (0, padding))
        return torch.cat([context, F.pad(latents, (0, 0, 0, padding)).flatten(1).to(context), mask.to(context)], 1)

    def _context(self, prefix: EncodedPrefix, state: Tensor) -> Tensor:
        """Concatenates the last hidden state of the prefix's last token and the robot's state, [n, width + state]."""
        return prefix.last if self.state_dim == 0 else torch.cat([prefix.last, state.to(prefix.last)], 1)

    # --- decisions of three kinds in one tensor ---

    def _in_order(self, latents: Tensor, exits: Tensor, actions: Tensor) -> Tensor:
        """Interleaves values of latents [n, K, ...], exits [n, K - 1 or 0, ...] and actions [n, action decision, ...]
        in the order of decisions. Returns [n, decisions, ...]."""
        if self.exits == 0:
            return torch.cat([latents, actions], 1)
        alternate = torch.stack([latents[:, :-1], exits], 2).flatten(1, 2)
        return torch.cat([alternate, latents[:, -1:], actions], 1)

    def _packed(self, latents: Tensor, exits: Tensor, actions: Tensor) -> Tensor:
        """Packs the distributions that `_distributions` returns into one tensor, [n, decisions, number, 2], padded with
        zeros."""
        by_decision = actions.view(len(actions), super().decisions, -1, 2)
        size = max(self.latent_dim, by_decision.shape[2])
        exits = F.pad(exits[..., None, None], (0, 1, 0, size - 1))
        latents, by_decision = (F.pad(part, (0, 0, 0, size - part.shape[2])) for part in (latents, by_decision))
        return self._in_order(latents, exits, by_decision)

    def _unpacked(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Unpacks the tensor of `_packed` into the distributions that `_distributions` returns."""
        reasoning, actions = packed.split([self.steps + self.exits, super().decisions], 1)
        stride = 2 if self.exits else 1  # with exits, latents are at even and exits at odd indices
        size = math.prod(self.shape) // super().decisions
        return (
            reasoning[:, ::stride, : self.latent_dim],
            reasoning[:, 1::stride, 0, 0][:, : self.exits],
            actions[:, :, :size].reshape(len(packed), *self.shape, 2),
        )


def bernoulli_entropy(logit: Tensor) -> Tensor:
    """Returns the entropy of Bernoulli distributions in nats, shaped like logit."""
    return -logit.sigmoid() * F.logsigmoid(logit) - (-logit).sigmoid() * F.logsigmoid(-logit)


def bernoulli_divergence(p: Tensor, q: Tensor) -> Tensor:
    """Returns KL(p || q) of Bernoulli distributions with logits p and q, [...] each."""
    of_ones = p.sigmoid() * (F.logsigmoid(p) - F.logsigmoid(q))
    of_zeros = (-p).sigmoid() * (F.logsigmoid(-p) - F.logsigmoid(-q))
    return of_ones + of_zeros
