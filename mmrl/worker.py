"""`python -m mmrl.worker HOST PORT NAME`: a worker, which ends when the process that started it does.

It is told a configuration, builds the policy, and answers what it is asked, one thing after the other, until the
connection is closed.
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

from mmrl.build import build_policy, build_task
from mmrl.config import Config, configure
from mmrl.controls import Controls
from mmrl.engine import take_device
from mmrl.errors import UserError, told
from mmrl.generation.arrival import read_folder
from mmrl.generation.checksums import checksum
from mmrl.placement import end_with_parent
from mmrl.protocols import Policy, Recording
from mmrl.quiet import quieten_environment
from mmrl.rollouts import Rollouts
from mmrl.workers.door import KEY, dial
from mmrl.workers.wire import decode, encode, objects_of


class Worker:
    """A policy apart from its training."""

    def __init__(self, tree: dict[str, Any]) -> None:
        """tree: of the configuration. Raises UserError as `mmrl train` does."""
        self.config: Config = configure(tree)
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        torch.manual_seed(self.config.seed)
        take_device()
        self.policy: Policy = build_policy(self.config, build_task(self.config))
        module = self.policy.module
        if self.config.model.dtype == "bfloat16":
            module.bfloat16()  # as the engine does
        if torch.cuda.is_available():
            module.to(torch.device("cuda", torch.cuda.current_device()))
        self.controls = Controls(self.config)

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
    worker: Worker | None = None
    while True:
        order = decode(link.recv_bytes())
        try:
            if worker is None:
                os.chdir(order["folder"])
                sys.path.append(order["folder"])  # as the command line does, for modules of the user's own
                worker = Worker(order["config"])
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
