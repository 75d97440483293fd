"""The service that a rollout worker runs: it builds a policy from a configuration and answers requests for rollouts and
responses."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.children.main import Service
from mmrl.errors import UserError
from mmrl.generation.weight_sync.checksums import checksum
from mmrl.generation.weight_sync.receiver import read_folder
from mmrl.protocols.abilities import Recording
from mmrl.rollouts import Prompt, Rollouts, Sample
from mmrl.schedules.schedule import Schedules
from mmrl.settings import load_attribute


@contextmanager
def logged() -> Iterator[None]:
    """Writes the traceback of an exception to the log; the trainer only gets one line."""
    try:
        yield
    except UserError:
        raise
    except Exception:
        traceback.print_exc()
        raise


class RolloutWorker(Service):
    """A service with a policy that samples for the training process."""

    @logged()
    def __init__(self, setup: dict[str, Any]) -> None:
        """Builds the policy. setup: "config", the plain configuration; "folder", the trainer's working directory;
        "builder", "package.module:function", which returns the configuration and the policy."""
        os.chdir(setup["folder"])
        sys.path.append(setup["folder"])  # as the command line does, for the user's own modules
        self.config, self.policy = load_attribute(setup["builder"])(setup["config"])
        module = self.policy.module
        if self.config.model.dtype == "bfloat16":
            module.bfloat16()  # as the engine does
        if torch.cuda.is_available():
            module.to(torch.device("cuda", torch.cuda.current_device()))
        self.controls = Schedules(self.config)

    @torch.no_grad()
    def load_weights(
        self, folder: Path, frozen: list[str], controls: dict[str, dict[str, float]]
    ) -> dict[str, list[int]]:
        """Loads weights from a folder. Returns [value, count] of the checksum of each loaded parameter, and of each
        parameter named in `frozen`. controls: the states of schedules. Raises UserError for a tensor of another
        shape."""
        parameters, names = dict(self.policy.module.named_parameters()), list(frozen)
        for name, value in read_folder(folder):
            if parameters[name].shape != value.shape:
                raise UserError(
                    f"parameter {name} has shape {list(parameters[name].shape)} in this worker, but "
                    f"{list(value.shape)} in the training process"
                )
            parameters[name].copy_(value)
            names.append(name)
        self.controls.load(controls)
        checksums = {name: checksum(parameters[name]) for name in names if name in parameters}
        return {name: [entry.value, entry.count] for name, entry in checksums.items()}

    def rollout(self, request: dict[str, Any]) -> Rollouts:
        """Returns rollouts, with `behaviour_logp` if the request asks for likelihoods."""
        rollouts = self.policy.rollout(request["prompts"], request["rollout"], request["seeds"], step=request["step"])
        if request["likelihoods"]:
            rollouts.behaviour_logp = self.likelihoods(rollouts)
        return rollouts

    @torch.no_grad()
    def likelihoods(self, rollouts: Rollouts) -> Tensor:
        """Returns log-probabilities [rollout, decision] float32, on the CPU, under the weights that sampled the
        rollouts."""
        recorded = self.policy.recorded_replay(rollouts) if isinstance(self.policy, Recording) else None
        if recorded is not None:
            return recorded.logp.float().cpu()
        parts = torch.arange(len(rollouts)).split(self.config.engine.micro_batch)
        return torch.cat(
            [self.policy.replay(rollouts.select(part), self.policy.module).logp.float().cpu() for part in parts]
        )

    @logged()
    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answers a request: with the key "weights" to load weights, with "rollout" (the group size) to sample
        rollouts, else to respond to each prompt once."""
        if "weights" in request:
            return {"checksums": self.load_weights(Path(request["weights"]), request["frozen"], request["controls"])}
        result: Rollouts | list[Sample] = (
            self.rollout(request) if "rollout" in request else self.policy.respond(request["prompts"], request["seeds"])
        )
        return {"result": result, "counts": self.policy.counts()}

    def shared(self, request: dict[str, Any]) -> Sequence[Any]:
        return shared_objects(request.get("prompts", []))


def shared_objects(prompts: Sequence[Prompt]) -> list[Any]:
    """Returns the objects that answers share with the prompts: the prompts and their images."""
    return [*prompts, *(image for prompt in prompts for image in prompt.images)]
