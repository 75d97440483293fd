"""Teachers: other policies of a policy's kind, whose weights are frozen, that its rollouts are compared with."""

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
    """The teachers of a policy, by the folder or hub name of their weights, which are read at first use.

    loader: set by the code that builds the policy; it takes a path and a guidance, and returns a policy of the same
    kind.
    """

    def __init__(self, student: nn.Module) -> None:
        """student: the network that is taught; teachers compute on its device."""
        self.student = student
        self.loader: Callable[[str, float | None], Policy] | None = None
        self._loaded: dict[tuple[str, float | None], Policy] = {}

    def check(self, path: str) -> None:  # noqa: B027  (kinds of policy know what they need of a teacher)
        """Raises UserError in one line for a teacher at `path` that can not judge the policy's decisions. Reads no
        weights."""

    def policy(self, path: str, guidance: float | None = None) -> Policy:
        """Returns a frozen teacher. guidance: of its denoising; None: the student's. Raises UserError where it can not
        be loaded."""
        if (path, guidance) not in self._loaded:
            self._loaded[path, guidance] = self._load(path, guidance)
        return self._loaded[path, guidance]

    def _load(self, path: str, guidance: float | None) -> Policy:
        """Loads a teacher, frozen and on the student's device, without drawing from the run's random numbers."""
        import torch

        if self.loader is None:
            raise UserError(f"teacher {path}: a policy that was built outside of a job can not load it")
        # A run draws the same numbers wherever it loads a teacher.
        with torch.random.fork_rng(devices=[]), name_second_model("teacher.path"):
            teacher = self.loader(path, guidance)
        teacher.module.requires_grad_(False).to(next(self.student.parameters()).device)
        return teacher


class TokenTeachers(Teachers):
    """The teachers of a policy whose decisions are tokens."""

    def vocabulary(self) -> Tensor:
        """Returns the ids that the policy may sample, [token] int64 in rising order."""
        raise NotImplementedError

    def ids(self, rollouts: Rollouts) -> list[tuple[list[int], list[int]]]:
        """Returns the token ids of prompt and response of each rollout. Raises UserError for a prompt that is more
        than token ids."""
        raise NotImplementedError

    def spelled(self, text: str) -> list[int]:
        """Returns the token ids of a string, without special tokens."""
        raise NotImplementedError


@runtime_checkable
@ability("teachers that judge its decisions (model.type=vision_language or diffusion)")
class Taught(Protocol):
    """A policy that can be compared with teachers, which replay its rollouts."""

    @property
    def teachers(self) -> Teachers: ...


@ability("teachers that judge its tokens (model.type=vision_language)")
class TaughtTokens(Protocol):
    """A policy of tokens that can be compared with teachers."""

    @property
    def teachers(self) -> TokenTeachers: ...
