"""A critic that shares the backbone of a vision-language model: the value of a prompt and the response so far."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from mmrl.errors import UserError
from mmrl.protocols.critic import SharedCritic

WEIGHTS = "critic.safetensors"


class TokenCritic(nn.Module):
    """An MLP that predicts the value of a prompt and the response so far from the hidden state of the last token. Its
    last layer is initialised to 0."""

    def __init__(self, settings: SharedCritic, width: int) -> None:
        """width: size of the hidden states of the model. A new critic returns 0, since its last layer is 0."""
        super().__init__()
        sizes, layers = [width, *[settings.width] * settings.layers], list[nn.Module]()
        for in_size, out_size in zip(sizes[:-1], sizes[1:], strict=True):
            layers += [nn.Linear(in_size, out_size), nn.GELU()]
        last = nn.Linear(settings.width, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.layers, self.detach = nn.Sequential(*layers, last), settings.detach

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns values [decision] fp32 of hidden states [decision, width]."""
        return self.layers(hidden.detach() if self.detach else hidden).squeeze(1).float()


def critic_of(model: PreTrainedModel, settings: SharedCritic, folder: Path) -> TokenCritic:
    """Builds a critic with the dtype and on the device of `model`, and loads the critic's weights if `folder` has them.
    Raises UserError if the loaded weights do not have the shapes that `settings` define."""
    critic = TokenCritic(settings, model.config.get_text_config().hidden_size)
    read_critic(critic, folder)
    return critic.to(device=model.device, dtype=model.dtype)


def write_critic(folder: Path, state: dict[str, Tensor]) -> None:
    """Saves the critic's weights in `folder`. state: the state dict of `TokenScorer`, with keys critic.*."""
    weights = {n.removeprefix("critic."): value.contiguous() for n, value in state.items() if n.startswith("critic.")}
    save_file(weights, folder / WEIGHTS)


def read_critic(critic: TokenCritic, folder: Path) -> None:
    """Loads the critic's weights from `folder`, if it has them. Raises UserError if their shapes differ."""
    if not (folder / WEIGHTS).is_file():
        return
    stored, expected = load_file(folder / WEIGHTS), critic.state_dict()
    for name in sorted(expected.keys() | stored.keys()):
        expected_shape, stored_shape = (
            list(state[name].shape) if name in state else "absent" for state in (expected, stored)
        )
        if expected_shape != stored_shape:
            raise UserError(
                f"{folder / WEIGHTS}: the shape of {name} is {stored_shape}, but {expected_shape} in algorithm.critic; "
                "set algorithm.critic as in the run that trained it"
            )
    critic.load_state_dict(stored)
