"""The configuration of a job, as its parts read it."""

from __future__ import annotations

from typing import Any, Protocol

from mmrl.protocols.requirements import Needs


class JobConfig(Protocol):
    """What a part may read of its job; `mmrl.config.Config` is one.

    Which class a section is depends on the job, and the room that owns the section knows it: the room's loader, for
    one, names the sections that its kind of model brings. So sections are not typed here, and no room stands on the
    configuration, which stands on all of them.
    """

    @property
    def run_dir(self) -> str: ...

    @property
    def seed(self) -> int: ...

    @property
    def steps(self) -> int: ...

    @property
    def model(self) -> Any: ...

    @property
    def task(self) -> Any: ...

    @property
    def rollout(self) -> Any: ...

    @property
    def algorithm(self) -> Any: ...

    @property
    def optim(self) -> Any: ...

    @property
    def engine(self) -> Any: ...

    @property
    def evaluation(self) -> Any: ...

    @property
    def log(self) -> Any: ...

    @property
    def generator(self) -> Any:
        """Settings of who samples for the policy; None where it samples itself."""

    @property
    def correction(self) -> Any:
        """Settings of the correction of decisions that a generator sampled."""

    @property
    def needs(self) -> Needs: ...

    @property
    def group_size(self) -> int: ...

    @property
    def rollouts_per_step(self) -> int: ...

    @property
    def total_updates(self) -> int: ...

    def section(self, name: str) -> Any:
        """A section that only jobs with this kind of model have."""
