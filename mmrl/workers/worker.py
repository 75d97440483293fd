"""`python -m mmrl.workers.worker HOST PORT NAME`: a worker, which ends when the process that started it does.

It is told a configuration and what builds the policy of one, builds it, and answers what it is asked, one thing after
the other, until the connection is closed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.config import Config
from mmrl.errors import UserError, told
from mmrl.generation.weight_sync.checksums import checksum
from mmrl.generation.weight_sync.receiver import read_folder
from mmrl.protocols.abilities import Recording
from mmrl.protocols.parts import Policy
from mmrl.rollouts import Rollouts
from mmrl.runtime.logging import quieten_environment
from mmrl.runtime.ray import end_with_parent
from mmrl.schedules.schedule import Schedules
from mmrl.settings import load_attribute
from mmrl.workers.rendezvous import KEY, dial
from mmrl.workers.serialization import decode, encode, objects_of


class RolloutWorker:
    """A policy apart from its training."""

    def __init__(self, config: Config, policy: Policy) -> None:
        self.config, self.policy = config, policy
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

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        if "take" in order:
            return {"held": self.take(Path(order["take"]), order["also"], order["controls"])}
        made: Any = self.rollout(order) if "rollout" in order else self.policy.respond(order["prompts"], order["seeds"])
        return {"made": made, "counts": self.policy.counts()}


def serve(link: Connection) -> None:
    """Answers until nobody listens any more. What goes wrong is told in one line, and stands in the log."""
    worker: RolloutWorker | None = None
    while True:
        order = decode(link.recv_bytes())
        try:
            if worker is None:
                os.chdir(order["folder"])
                sys.path.append(order["folder"])  # as the command line does, for modules of the user's own
                worker = RolloutWorker(*load_attribute(order["builder"])(order["config"]))
                answer = encode({})
            else:
                answer = encode(worker.answer(order), objects_of(order.get("prompts", [])))
        except UserError as error:
            answer = encode({"problem": str(error)})
        except Exception as error:  # any fault of a policy, a task or a simulator
            traceback.print_exc()
            answer = encode({"problem": told(error)})
        link.send_bytes(answer)


def main() -> None:
    quieten_environment()
    threading.Thread(target=end_with_parent, daemon=True).start()
    host, port, name = sys.argv[1:]
    link = dial(host, int(port), os.environ.pop(KEY), name)
    try:
        serve(link)
    except (EOFError, ConnectionError):  # the training process has ended, or has no more use for this one
        os.killpg(0, signal.SIGKILL)  # with the processes of simulators


if __name__ == "__main__":
    main()
