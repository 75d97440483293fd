"""The process that samples in place of the training process: it is told a configuration and what builds the policy of
one, builds it, and answers what it is asked."""

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
from mmrl.rollouts import Prompt, Rollouts
from mmrl.schedules.schedule import Schedules
from mmrl.settings import load_attribute


@contextmanager
def logged() -> Iterator[None]:
    """Writes what goes wrong into the log, too: it is told in one line."""
    try:
        yield
    except UserError:
        raise
    except Exception:
        traceback.print_exc()
        raise


class RolloutWorker(Service):
    """A policy apart from its training."""

    @logged()
    def __init__(self, order: dict[str, Any]) -> None:
        os.chdir(order["folder"])
        sys.path.append(order["folder"])  # as the command line does, for modules of the user's own
        self.config, self.policy = load_attribute(order["builder"])(order["config"])
        module = self.policy.module
        if self.config.model.dtype == "bfloat16":
            module.bfloat16()  # as the engine does
        if torch.cuda.is_available():
            module.to(torch.device("cuda", torch.cuda.current_device()))
        self.controls = Schedules(self.config)

    @torch.no_grad()
    def take(self, folder: Path, also: list[str], controls: dict[str, dict[str, float]]) -> dict[str, list[int]]:
        """Replaces weights by those in a folder. Of each of them, and of those named in `also`, value and count of the
        checksum."""
        own, names = dict(self.policy.module.named_parameters()), list(also)
        for name, value in read_folder(folder):
            if own[name].shape != value.shape:
                raise UserError(f"{name} is {list(own[name].shape)} here and {list(value.shape)} in training")
            own[name].copy_(value)
            names.append(name)
        self.controls.load(controls)
        sums = {name: checksum(own[name]) for name in names if name in own}
        return {name: [own.value, own.count] for name, own in sums.items()}

    def rollout(self, order: dict[str, Any]) -> Rollouts:
        made = self.policy.rollout(order["prompts"], order["rollout"], order["seeds"], step=order["step"])
        if order["likelihoods"]:
            made.behaviour_logp = self.likelihoods(made)
        return made

    @torch.no_grad()
    def likelihoods(self, made: Rollouts) -> Tensor:
        """[rollout, decision] float32, on the CPU, by the weights that made them."""
        said = self.policy.recorded(made) if isinstance(self.policy, Recording) else None
        if said is not None:
            return said.logp.float().cpu()
        parts = torch.arange(len(made)).split(self.config.engine.micro_batch)
        return torch.cat(
            [self.policy.replay(made.select(part), self.policy.module).logp.float().cpu() for part in parts]
        )

    @logged()
    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        if "take" in order:
            return {"held": self.take(Path(order["take"]), order["also"], order["controls"])}
        made: Any = self.rollout(order) if "rollout" in order else self.policy.respond(order["prompts"], order["seeds"])
        return {"made": made, "counts": self.policy.counts()}

    def shared(self, request: dict[str, Any]) -> Sequence[Any]:
        return objects_of(request.get("prompts", []))


def objects_of(prompts: Sequence[Prompt]) -> list[Any]:
    """Returns what the answers to prompts share with them: the prompts and their images."""
    return [*prompts, *(image for prompt in prompts for image in prompt.images)]
