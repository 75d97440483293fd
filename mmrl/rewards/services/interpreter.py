"""Rewards in a process of another Python interpreter, such as one of an environment that `mmrl rewards install` made.

That interpreter needs mmrl, torch, numpy, Pillow and pydantic, and what the reward needs. Its versions of these may
differ from those of the trainer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from mmrl.children.child import Child, Lost, OnThisHost, Raised
from mmrl.children.frames import encode
from mmrl.children.main import Service
from mmrl.errors import UserError
from mmrl.rewards.services.failures import Failure, Failures
from mmrl.rewards.services.spans import validate_spans
from mmrl.rewards.types import BatchReward, Score, load_object, to_scores
from mmrl.rollouts import Sample, Spans
from mmrl.runtime import devices

START_S = 7200.0  # seconds for a process to load its model, which it may have to download first
SERVICE = "mmrl.rewards.services.interpreter:RewardService"


class RewardProcess:
    """A batched reward that runs in one process of the interpreter `python`, which starts at once and stays.

    name, options, signature: as for `mmrl.rewards.build`, which the process calls. If a batch takes more than
    `deadline_s` seconds, or the process ends during it, its samples have no score and are counted in `failures`, and
    the next batch gets a new process. All processes end with the trainer.

    Raises ValueError if there is no such interpreter, if mmrl does not run under it, and if it cannot build the reward.
    score() raises UserError if the reward raises it, and `mmrl.children.child.Raised` for other errors of the reward.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        python: str,
        deadline_s: float,
        failures: Failures,
        signature: str = "mmrl",
    ) -> None:
        if not (os.path.isfile(python) and os.access(python, os.X_OK)):
            raise ValueError(
                f"reward {name!r}: there is no interpreter python={python}; set python to the path of one, such as a "
                "path that mmrl rewards install prints"
            )
        self.python, self.deadline_s, self.failures = python, deadline_s, failures
        # the first request to the process, which builds the reward
        self._first = {"name": name, "options": dict(options), "signature": signature, "gpu": devices.device_index()}
        self._child = Child(SERVICE, OnThisHost(python), records=(Spans,))
        self.scope: Literal["sample", "group", "batch"] = self._start()

    def score(self, samples: Sequence[Sample]) -> list[Score | Spans]:
        """Returns what the process answers. If it takes too long or ends, it is closed, and every sample of the batch
        is recorded as failed."""
        request = encode([_without_history(sample) for sample in samples])
        try:
            if not self._child.up:
                self._start()
            values: list[Score | Spans] = self._child.ask(request, self.deadline_s)
            return values
        except TimeoutError:
            failure = self.failures.record_timeout(self.deadline_s)
        except (Lost, ValueError) as error:
            failure = Failure("crash", str(error))
        self.close()
        return [self.failures.record(sample, failure) for sample in samples]

    def close(self) -> None:
        """Ends the process; a later call starts another one."""
        self._child.stop()

    def _start(self) -> Any:
        """Starts the process and returns the scope of its reward. Raises ValueError if it cannot build the reward."""
        name = self._first["name"]
        self._child.start()
        try:
            return self._child.ask(encode(self._first), START_S)
        except UserError as error:
            problem = str(error)
        except Raised as error:
            problem = f"python={self.python} cannot build it: {error}"
        except (Lost, TimeoutError) as error:
            problem = f"python={self.python} does not run mmrl: {error}; it needs mmrl, torch, numpy, Pillow, pydantic"
        self.close()
        raise ValueError(problem if problem.startswith(f"reward {name!r}") else f"reward {name!r}: {problem}")


def _without_history(sample: Sample) -> Sample:
    """Returns the sample without `before_start`, the prompt before an environment began the conversation, which may
    hold a user's own classes."""
    return replace(sample, prompt=replace(sample.prompt, before_start=None))


class RewardService(Service):
    """The service that runs in a `RewardProcess`, under the other interpreter. The first request is a mapping with
    name, options, signature and gpu, the index of the caller's GPU or None; each later request is a list of samples.
    facts: the scope of the reward."""

    def __init__(self, request: dict[str, Any]) -> None:
        """Builds the reward of the first request: a mapping with name, options and signature, and gpu, the index of the
        GPU to use or None. Raises UserError if it cannot be built."""
        gpu = request.pop("gpu")
        if gpu is not None:
            import torch

            torch.cuda.set_device(gpu)
        try:
            self.reward: Any = load_object("mmrl.rewards.registry:build")(**request, isolated=False)
        except ValueError as error:
            raise UserError(str(error)) from error
        self.facts = self.reward.scope if isinstance(self.reward, BatchReward) else "sample"

    def answer(self, request: list[Sample]) -> list[Score | Spans]:
        """Returns the score or the spans of each sample, as numbers of Python."""
        if isinstance(self.reward, BatchReward):
            values = list(self.reward.score(request))
        else:
            values = [self.reward(sample) for sample in request]
        return [validate_spans(value) if isinstance(value, Spans) else to_scores([value], 1)[0] for value in values]
