"""The interface of a job's configuration for the packages below `mmrl.config`, which cannot import it."""

from __future__ import annotations

from typing import Any, Protocol

from mmrl.protocols.requirements import Needs


class JobConfig(Protocol):
    """A job's configuration; `mmrl.config.Config` implements it.

    Sections have the type Any here, since their classes depend on the job: model.type and algorithm.type select them.
    The package that owns a section knows its class.
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
    def checkpoint(self) -> Any: ...

    @property
    def generator(self) -> Any:
        """Settings of the engine that samples for the policy; None where the policy samples itself."""

    @property
    def correction(self) -> Any:
        """Settings of the importance-sampling correction for decisions that a generator sampled."""

    @property
    def needs(self) -> Needs: ...

    @property
    def group_size(self) -> int: ...

    @property
    def rollouts_per_step(self) -> int: ...

    @property
    def total_updates(self) -> int: ...

    def section(self, name: str) -> Any:
        """Returns a section that only jobs with this kind of model have."""
