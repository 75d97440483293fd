"""A critic of unfinished responses."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from mmrl.errors import UserError
from mmrl.protocols.critic import SharedCritic

WEIGHTS = "critic.safetensors"


class TokenCritic(nn.Module):
    """Predicts the value of a prompt and the response so far, from the hidden state of its last token. It begins at
    0."""

    def __init__(self, settings: SharedCritic, width: int) -> None:
        """width: of the model's hidden states."""
        super().__init__()
        sizes, layers = [width, *[settings.width] * settings.layers], list[nn.Module]()
        for a, b in zip(sizes[:-1], sizes[1:], strict=True):
            layers += [nn.Linear(a, b), nn.GELU()]
        last = nn.Linear(settings.width, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.layers, self.detach = nn.Sequential(*layers, last), settings.detach

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns values: [decision, width] -> [decision] fp32."""
        return self.layers(hidden.detach() if self.detach else hidden).squeeze(1).float()


def critic_of(model: PreTrainedModel, settings: SharedCritic, folder: Path) -> TokenCritic:
    """Builds a critic of the model's hidden states, with its dtype and on its device. folder: where its weights may
    lie; else it begins anew. Raises UserError as `read_critic`."""
    critic = TokenCritic(settings, model.config.get_text_config().hidden_size)
    read_critic(critic, folder)
    return critic.to(device=model.device, dtype=model.dtype)


def write_critic(folder: Path, state: dict[str, Tensor]) -> None:
    """Saves the critic's weights. state: the weights of the module that the engine wraps."""
    weights = {n.removeprefix("critic."): value.contiguous() for n, value in state.items() if n.startswith("critic.")}
    save_file(weights, folder / WEIGHTS)


def read_critic(critic: TokenCritic, folder: Path) -> None:
    """Loads the weights of the critic in `folder`, if there is one. Raises UserError if it is of another shape."""
    if not (folder / WEIGHTS).is_file():
        return
    stored, expected = load_file(folder / WEIGHTS), critic.state_dict()
    for name in sorted(expected.keys() | stored.keys()):
        shapes = [list(held[name].shape) if name in held else None for held in (expected, stored)]
        if shapes[0] != shapes[1]:
            raise UserError(
                f"algorithm.critic makes {name} {shapes[0]}, but in {folder / WEIGHTS} it is {shapes[1]}; ask for the "
                "critic that it was trained with"
            )
    critic.load_state_dict(stored)
