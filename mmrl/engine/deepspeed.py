"""The training engine: every job runs under DeepSpeed, from one process on a laptop's CPU to many nodes."""

from __future__ import annotations

import gc
import logging
import math
import os
import socket
import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
os.environ.setdefault("DS_LOG_LEVEL", "error")

import deepspeed  # noqa: E402  (reads DS_ACCELERATOR when imported)

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # names that DeepSpeed uses
# Shared-memory all-reduce for CPU ranks would be compiled at the first start (half a minute) and gains nothing here.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class GuardedAdamW(torch.optim.AdamW):
    """AdamW that clips, and leaves weights alone when the gradient's norm is not finite.

    ZeRO's optimizers do both around the optimizer they wrap; without ZeRO (`clip_grad_norm` given) nobody does. The
    gradients are already summed over ranks here, so all ranks decide alike. The attributes are those that DeepSpeed
    reads from its own optimizers.
    """

    def __init__(self, *args: Any, clip_grad_norm: float | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.clip_grad_norm = clip_grad_norm
        self.overflow = False
        self._global_grad_norm = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.clip_grad_norm is not None:
            parameters = [p for group in self.param_groups for p in group["params"]]
            norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            self._global_grad_norm = float(norm)
            self.overflow = not math.isfinite(self._global_grad_norm)
            if self.overflow:
                return None
            if self.clip_grad_norm > 0:
                nn.utils.clip_grads_with_norm_(parameters, self.clip_grad_norm, norm)
        return super().step(closure)


def learning_rate(step: int, *, lr: float, warmup: int, schedule: str, total: int) -> float:
    """The learning rate of optimizer step `step` (from 0): linear warm-up, then constant, linear or cosine to 0."""
    if step < warmup:
        return lr * (step + 1) / warmup
    share = min(1.0, (step - warmup) / max(1, total - warmup))
    if schedule == "linear":
        return lr * (1 - share)
    return lr * (1 + math.cos(math.pi * share)) / 2 if schedule == "cosine" else lr


class Ranks:
    """The group of processes a job runs in, and what they tell each other."""

    def __init__(self) -> None:
        start_distributed()

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world(self) -> int:
        return dist.get_world_size()

    @property
    def device(self) -> torch.device:
        """Where tensors of a collective must lie."""
        return (
            torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
        )

    def sum(self, value: Tensor) -> Tensor:
        """The sum of a tensor over ranks."""
        total = value.detach().clone().to(self.device)
        dist.all_reduce(total)
        return total

    def max(self, value: int) -> int:
        tensor = torch.tensor(int(value), device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order (any picklable object; for small things)."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        """Leave the process group in order; without this gloo's thread aborts the interpreter at exit.

        Called while an exception unwinds it waits for nobody: the other ranks may be in the middle of a step, and the
        launcher ends them once this one has ended.
        """
        if not dist.is_initialized():  # an engine for generation has ended it
            return
        if sys.exc_info()[0] is None:
            dist.barrier()
        deepspeed.comm.destroy_process_group()  # torch's own, and the groups that DeepSpeed remembers


class Engine(Ranks):
    """Wraps a module for training. Call it like the module.

    The accumulation window belongs to the caller: any number of `backward` calls, then one `step`. A loss must already
    be divided by its *global* denominator (see `mmrl.core.reduce`); gradients are summed over micro-batches and ranks,
    so loss and gradient do not depend on how a batch was split.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        lr: float = 1e-6,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        schedule: str = "constant",
        total_steps: int = 1,
        clip_grad_norm: float = 1.0,
        zero_stage: int = 0,
        offload: str = "none",
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        self.zero_stage = zero_stage
        self._schedule: dict[str, Any] = {"lr": lr, "warmup": warmup_steps, "schedule": schedule, "total": total_steps}
        self.updates = 0  # optimizer steps taken, skipped ones not counted
        trained = [p for p in module.parameters() if p.requires_grad]
        decayed = [p for p in trained if p.ndim >= 2]
        plain = [p for p in trained if p.ndim < 2]  # biases and norm scales are not decayed
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
        own_clip = clip_grad_norm if zero_stage == 0 else None
        optimizer = GuardedAdamW(
            [g for g in groups if g["params"]], lr=lr, betas=betas, eps=eps, clip_grad_norm=own_clip
        )
        self._engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            config=self._deepspeed_config(0.0 if own_clip is not None else clip_grad_norm, offload, dtype),
        )

    def _deepspeed_config(self, clip_grad_norm: float, offload: str, dtype: str) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.zero_stage, "overlap_comm": False}
        if offload != "none":
            zero["offload_optimizer"] = {"device": "cpu"}
        if offload == "all":
            zero["offload_param"] = {"device": "cpu"}
        if self.zero_stage == 3:
            zero["stage3_gather_16bit_weights_on_model_save"] = True
        return {
            "train_micro_batch_size_per_gpu": 1,  # a formality: the caller owns batches
            "managed_gradient_accumulation": False,
            "gradient_clipping": clip_grad_norm,
            "zero_optimization": zero,
            "bf16": {"enabled": dtype == "bfloat16"},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": None,
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine(*args, **kwargs)

    @property
    def lr(self) -> float:
        return learning_rate(self.updates, **self._schedule)

    # --- one optimizer step ---

    def backward(self, loss: Tensor) -> None:
        # DeepSpeed averages gradients over ranks; the global denominator asks for their sum.
        self._engine.backward(loss * self.world, scale_wrt_gas=False)

    def step(self) -> tuple[bool, float]:
        """Clip, update, clear gradients. Returns whether weights changed, and the gradient's norm before clipping (not
        finite when the update was skipped)."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = self.lr
        self._engine.step()
        applied = not self._engine.optimizer.overflow
        self.updates += applied
        return applied, float(self._engine.get_global_grad_norm())

    # --- files ---

    def state(self) -> dict[str, Tensor]:
        """Full weights of the module on rank 0 (under ZeRO-3 gathered there; empty on other ranks), on the CPU.

        A collective: every rank must call it.
        """
        if self.zero_stage == 3:
            state = self._engine._zero3_consolidated_16bit_state_dict()
        else:
            state = self._engine.module.state_dict()
        return {k: v.detach().cpu() for k, v in state.items()} if self.rank == 0 else {}

    def save(self, folder: Path) -> None:
        """Weights, optimizer and step count of all ranks into `folder` (DeepSpeed's format).

        Raises OSError or RuntimeError on the rank whose file could not be written. It still takes part in what
        DeepSpeed does together with the others, who would otherwise wait for it for ever.
        """
        writer = self._engine.checkpoint_engine
        problems: list[OSError | RuntimeError] = []

        def write(*args: Any, **kwargs: Any) -> None:
            try:
                type(writer).save(writer, *args, **kwargs)
            except (OSError, RuntimeError) as error:  # torch reports a failed write as RuntimeError
                problems.append(error)

        writer.save = write
        try:
            self._engine.save_checkpoint(
                folder, tag="engine", client_state={"updates": self.updates}, save_latest=False
            )
        finally:
            del writer.save
        if problems:
            raise problems[0]

    def load(self, folder: Path) -> None:
        _, client = self._engine.load_checkpoint(folder, tag="engine", load_lr_scheduler_states=False)
        self.updates = client["updates"]

    def release(self) -> None:
        """Give up weights and optimizer. Before an engine for generation is closed: that may end the process group,
        which DeepSpeed still asks here under ZeRO-3."""
        if self._engine is not None:
            self._engine.destroy()
            self._engine = None
            gc.collect()

    def close(self) -> None:
        self.release()
        super().close()


def start_distributed() -> None:
    """Join the launcher's process group; without a launcher, be a group of one on a free port."""
    if dist.is_initialized():
        return
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        alone = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        os.environ.update(alone)
    deepspeed.init_distributed(verbose=False, timeout=timedelta(minutes=30))


def gathered(parameters: list[nn.Parameter]) -> AbstractContextManager[None]:
    """Inside it parameters are whole also where ZeRO-3 keeps a slice on each rank (a collective then)."""
    split = [p for p in parameters if "ds_id" in vars(p)]
    return deepspeed.zero.GatheredParameters(split) if split else nullcontext()


def memory_estimate(module: nn.Module, zero_stage: int, world: int, dtype: str) -> list[str]:
    """Lines that say what a rank holds for weights, gradients and optimizer; activations come on top.

    ZeRO 1 shards the optimizer, 2 the gradients too, 3 the weights too (arXiv 1910.02054).
    """
    parameters = [(p.numel(), p.requires_grad) for p in module.parameters()]
    all_, trained = sum(n for n, _ in parameters), sum(n for n, grad in parameters if grad)
    width = 2 if dtype == "bfloat16" else 4
    optimizer = trained * (8 + (4 if width == 2 else 0))  # two fp32 moments, and an fp32 copy of bf16 weights
    share = [world if zero_stage >= stage else 1 for stage in (3, 2, 1)]
    parts = [all_ * width / share[0], trained * width / share[1], optimizer / share[2]]
    named = ", ".join(f"{n} {b / 2**20:.1f}" for n, b in zip(("weights", "gradients", "optimizer"), parts, strict=True))
    return [
        f"{all_ / 1e6:.2f}M parameters, {trained / 1e6:.2f}M trained",
        f"a rank holds {sum(parts) / 2**20:.1f} MiB ({named}), and activations besides",
    ]
