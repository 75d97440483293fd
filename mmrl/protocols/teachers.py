"""Teachers for distillation: frozen policies of the same kind as the trained one, which score its rollouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from mmrl.errors import UserError, name_second_model
from mmrl.protocols.abilities import ability

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mmrl.protocols.parts import Policy
    from mmrl.rollouts import Rollouts


class Teachers:
    """The teachers of a policy by the folder or hub name of their weights. Each is loaded at its first use.

    loader: loads a policy from a path and a guidance scale (None: the student's); set by the code that builds the
    policy.
    """

    def __init__(self, student: nn.Module) -> None:
        """student: the network that is trained; teachers are moved to its device."""
        self.student = student
        self.loader: Callable[[str, float | None], Policy] | None = None
        self._loaded: dict[tuple[str, float | None], Policy] = {}

    def check(self, path: str, guidance: float | None) -> None:  # noqa: B027  (subclasses know what they need)
        """Raises UserError for a teacher at `path` that cannot score the policy's decisions. Does not read its weights.
        guidance: see `policy`."""

    def policy(self, path: str, guidance: float | None = None) -> Policy:
        """Returns a frozen teacher, which is loaded once. guidance: its classifier-free guidance scale in denoising;
        None: the student's. Raises UserError where it cannot be loaded."""
        if (path, guidance) not in self._loaded:
            self._loaded[path, guidance] = self._load(path, guidance)
        return self._loaded[path, guidance]

    def _load(self, path: str, guidance: float | None) -> Policy:
        """Loads a teacher, freezes it and moves it to the student's device."""
        import torch

        if self.loader is None:
            raise UserError(
                f"teacher {path} cannot be loaded, because the policy was built outside of a job; let mmrl.Job build "
                "the policy"
            )
        # The run's random numbers must not depend on the step in which a teacher is loaded.
        with torch.random.fork_rng(devices=[]), name_second_model("teacher.path"):
            teacher = self.loader(path, guidance)
        teacher.module.requires_grad_(False).to(next(self.student.parameters()).device)
        return teacher


class TokenTeachers(Teachers):
    """The teachers of a policy whose decisions are tokens."""

    def vocabulary(self) -> Tensor:
        """Returns the token ids that the policy may sample, [token] int64 in ascending order."""
        raise NotImplementedError

    def ids(self, rollouts: Rollouts) -> list[tuple[list[int], list[int]]]:
        """Returns the token ids of the prompt and of the response of each rollout. Raises UserError for a prompt that
        token ids do not describe, such as one with images."""
        raise NotImplementedError

    def tokenize(self, text: str) -> list[int]:
        """Returns the token ids of a string, without special tokens."""
        raise NotImplementedError


@runtime_checkable
@ability("teachers that judge its decisions (model.type=vision_language, diffusion or vision_language_action)")
class Taught(Protocol):
    """A policy that can be distilled from teachers, which replay its rollouts."""

    @property
    def teachers(self) -> Teachers: ...


@ability("teachers that judge its tokens (model.type=vision_language)")
class TaughtTokens(Protocol):
    """A policy of tokens that can be distilled from teachers."""

    @property
    def teachers(self) -> TokenTeachers: ...
