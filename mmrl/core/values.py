"""Small networks that estimate the value of states and actions, and their losses."""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call


def tilted_loss(value: Tensor, outcome: Tensor, eta: float) -> Tensor:
    """Computes (e^z - z - 1) / eta^2 with z = eta (outcome - value), or its limit z^2 / 2 for eta 0, elementwise.

    Its mean is smallest at the value (1 / eta) log E exp(eta outcome), which for eta 0 is the mean outcome. Beyond z =
    5 the loss continues linearly, so that its gradient stays bounded.
    """
    difference = outcome - value
    if eta == 0:
        return difference.square() / 2
    z = eta * difference
    bounded = z.clamp(max=5.0)
    linear = (math.exp(5.0) - 1) * (z - bounded)
    return (bounded.exp() - 1 - bounded + linear) / eta**2


def expectile_error(difference: Tensor, expectile: float) -> Tensor:
    """Computes |expectile - 1[u < 0]| u^2 of u = target - value, of its shape (IQL, arXiv 2110.06169, equation 5)."""
    weights = torch.where(difference < 0, 1 - expectile, expectile)
    return weights * difference.square()


class ValueNetwork(nn.Module):
    """A perceptron with two hidden layers from features [row, inputs] to values [row], in fp64. Its last layer is
    initialized with zeros."""

    def __init__(self, inputs: int, width: int, seed: int, *, layer_norm: bool = False) -> None:
        """inputs: number of features; width: of the hidden layers. seed: seed of the weights, which are Gaussian with
        variance 1 / fan-in. layer_norm: normalizes hidden layers before their activation (RLPD, arXiv 2302.02948)."""
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        layers = [nn.Linear(a, b, dtype=torch.float64) for a, b in ((inputs, width), (width, width), (width, 1))]
        for layer in layers:
            drawn = torch.randn(layer.in_features, layer.out_features, generator=generator, dtype=torch.float64)
            nn.init.zeros_(layer.bias)
            layer.weight.data = (drawn / math.sqrt(layer.in_features)).T.contiguous()
        nn.init.zeros_(layers[-1].weight)
        hidden = [
            module
            for layer in layers[:2]
            for module in (layer, *([nn.LayerNorm(width, dtype=torch.float64)] if layer_norm else []), nn.SiLU())
        ]
        self.layers = nn.Sequential(*hidden, layers[2])

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x.double())
        return output[:, 0]


class QEnsemble(nn.Module):
    """Several Q networks of equal shape with different weights, each with a target network that follows it slowly."""

    def __init__(self, inputs: int, width: int, members: int, seed: int) -> None:
        """inputs: number of features of a state and an action together; members: number of Q networks."""
        super().__init__()
        self.online = nn.ModuleList(
            ValueNetwork(inputs, width, seed + member, layer_norm=True) for member in range(members)
        )
        self.targets = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the Q value of each row of states and actions [row, number] by each network, [member, row]."""
        return torch.stack([network(x) for network in self.online])

    def target(self, x: Tensor) -> Tensor:
        """Returns the least Q value of the target networks for each row of states and actions x [row, number], [row],
        without gradient (clipped double Q, TD3, arXiv 1802.09477)."""
        with torch.no_grad():
            return torch.stack([network(x) for network in self.targets]).amin(0)

    def fixed(self, x: Tensor) -> Tensor:
        """Returns the Q value of each row of states and actions [row, number] by each network, [member, row]. Gradients
        flow to `x`, but not to the weights."""
        return torch.stack([functional_call(network, detached(network), (x,)) for network in self.online])

    def update_targets(self, tau: float) -> None:
        """Moves the target networks to target + tau (online - target)."""
        with torch.no_grad():
            for target, online in zip(self.targets.parameters(), self.online.parameters(), strict=True):
                target.lerp_(online, tau)


class EntropyTemperature(nn.Module):
    """The weight of a policy's entropy in its objective. The parameter is its logarithm, 0-d fp64."""

    def __init__(self, initial: float) -> None:
        super().__init__()
        self.log_value = nn.Parameter(torch.tensor(math.log(initial), dtype=torch.float64))

    @property
    def value(self) -> Tensor:
        """Returns the weight without gradient, 0-d."""
        return self.log_value.detach().exp()

    def forward(self, logp: Tensor, target: float) -> Tensor:
        """Computes the loss of each log-probability [row], whose gradient raises the weight where the entropy, the mean
        of -logp, is below `target` (SAC, arXiv 1812.05905, equation 18, with the logarithm in place of the weight)."""
        return -self.log_value * (logp.detach().double() + target)


def detached(module: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters of a module by name, without gradient."""
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def td_target(reward: Tensor, discount: Tensor, terminated: Tensor, next_value: Tensor) -> Tensor:
    """Computes reward + discount next_value, without the second term where the episode terminated. All: [row]."""
    return reward + (discount * next_value).where(~terminated, 0)


def fit_values(
    network: Callable[[Tensor], Tensor],
    update: Callable[[Tensor], None],
    x: Tensor,
    outcome: Tensor,
    *,
    eta: float,
    passes: int,
    size: int,
    seed: int,
) -> float:
    """Trains `network` with `tilted_loss` in `passes` epochs over shuffled batches of `size` rows. Returns the mean
    loss of the last epoch.

    x: [row, feature]; outcome: [row], the reward at the end of each row's episode; update: takes an optimizer step on a
    0-d loss; seed: of the order of rows.
    """
    generator, mean_loss = torch.Generator().manual_seed(seed), 0.0
    for _ in range(passes):
        losses = []
        for rows in torch.randperm(len(x), generator=generator).split(size):
            loss = tilted_loss(network(x[rows]), outcome[rows].double(), eta).mean()
            update(loss)
            losses.append(float(loss.detach()))
        mean_loss = sum(losses) / len(losses)
    return mean_loss


def word_counts(text: str, count: int) -> Tensor:
    """Returns how many words of a string fall into each of `count` buckets, [count] float64. A word's bucket is its
    CRC-32, which is the same in every process, unlike Python's hash."""
    counts = torch.zeros(count, dtype=torch.float64)
    for word in text.lower().split():
        counts[zlib.crc32(word.encode()) % count] += 1.0
    return counts
