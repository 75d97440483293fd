"""The training engine: every job runs under DeepSpeed, from one process on a laptop's CPU to many nodes."""

from __future__ import annotations

import gc
import hashlib
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmrl.engine.settings import EngineSettings, Optim, ParameterGroup

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
os.environ.setdefault("DS_LOG_LEVEL", "error")

import deepspeed  # noqa: E402  (needs_column DS_ACCELERATOR when imported)
from deepspeed.runtime.zero import unwrap_model_for_generation  # noqa: E402

from mmrl.engine import files, reshape  # noqa: E402
from mmrl.engine.ema import local_part, reshaped  # noqa: E402
from mmrl.engine.heartbeat import Heartbeat  # noqa: E402
from mmrl.engine.launcher import ANY_PORT, INIT_METHOD, end_with_launcher, gloo_on_loopback, select_device  # noqa: E402
from mmrl.engine.memory import accumulates_in_fp32  # noqa: E402
from mmrl.engine.packing import exchange_messages, gather_messages, pack, unpack  # noqa: E402

T = TypeVar("T")
LATER = 60.0  # seconds that a collective waits on, so that ranks that watch each other name the missing one before
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers of so many bytes

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # names that DeepSpeed uses
# Shared-memory all-reduce for CPU ranks would be compiled at the first start (half a minute) and gains nothing here.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class GuardedOptimizer(torch.optim.Optimizer):
    """Mixin before an optimizer of torch's: clips gradients, and leaves weights alone when the gradient's norm is not
    finite.

    ZeRO's optimizers do both around the optimizer they wrap; without ZeRO this class does (`clip_grad_norm` given). The
    gradients are already summed over ranks here, so all ranks decide alike. The attributes are those that DeepSpeed
    reads from its own optimizers.
    """

    def __init__(self, *args: Any, clip_grad_norm: float | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.clip_grad_norm = clip_grad_norm
        self.overflow = False
        self._global_grad_norm = 0.0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
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


def guarded(kind: type[torch.optim.Optimizer]) -> Callable[..., GuardedOptimizer]:
    """Returns the class of optimizers of this kind that are a `GuardedOptimizer` too."""
    return type(f"Guarded{kind.__name__}", (GuardedOptimizer, kind), {})


def learning_rate(step: int, *, lr: float, warmup: int, schedule: str, total: int, hold: int = 0) -> float:
    """The learning rate of optimizer step `step` (from 0): 0 for the first `hold` steps, then linear warm-up, then
    constant, linear or cosine to 0."""
    if step < hold:
        return 0.0
    step, total = step - hold, total - hold
    if step < warmup:
        return lr * (step + 1) / warmup
    share = min(1.0, (step - warmup) / max(1, total - warmup))
    if schedule == "linear":
        return lr * (1 - share)
    return lr * (1 + math.cos(math.pi * share)) / 2 if schedule == "cosine" else lr


def parameter_groups(
    module: nn.Module, optim: Optim, total: int
) -> tuple[list[dict[str, Any]], list[Callable[[int], float]]]:
    """The optimizer's groups of the trained parameters, and each one's learning rate by optimizer step (from 0).

    A parameter belongs to the named group `optim.groups[name]` if its own name begins with "name.". Biases and scales
    of norms are not decayed. `total`: optimizer steps of the run. The first group holds what belongs to no named one.
    """
    groups: list[dict[str, Any]] = []
    rates: list[Callable[[int], float]] = []
    for name in ("", *optim.groups):
        overrides = optim.groups.get(name, ParameterGroup())
        members = [p for n, p in module.named_parameters() if p.requires_grad and _group_of(n, optim) == name]
        decay = optim.weight_decay if overrides.weight_decay is None else overrides.weight_decay
        rate = partial(
            learning_rate,
            lr=optim.lr if overrides.lr is None else overrides.lr,
            warmup=optim.warmup_steps if overrides.warmup_steps is None else overrides.warmup_steps,
            schedule=optim.schedule,
            total=total,
            hold=0 if name else optim.hold_steps,
        )
        for parameters, weight_decay in (
            ([p for p in members if p.ndim >= 2], decay),
            ([p for p in members if p.ndim < 2], 0.0),
        ):
            if parameters:
                groups.append({"params": parameters, "weight_decay": weight_decay})
                rates.append(rate)
    return groups, rates


def _group_of(parameter: str, optim: Optim) -> str:
    return next((name for name in optim.groups if parameter.startswith(f"{name}.")), "")


class Ranks:
    """The group of processes that a job runs in, with its collectives."""

    def __init__(self, timeout: float = 1800.0) -> None:
        """timeout: seconds that this rank waits for another one."""
        start_distributed(timeout)
        self._objects = objects_group(timeout)
        self.timeout = timeout
        self.waited = 0.0  # seconds in the collectives of this object
        self._watch: Heartbeat | None = None

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world(self) -> int:
        return dist.get_world_size()

    @property
    def device(self) -> torch.device:
        """The device of tensors in a collective."""
        return (
            torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
        )

    def watch(self, heartbeat: Heartbeat) -> None:
        """Has collectives marked in the heartbeat by which ranks watch each other; closes it with this object."""
        self._watch = heartbeat

    def mark(self, phase: str | None = None) -> None:
        """Tells the other ranks that this one has begun a phase, or a collective. All ranks do so alike."""
        if self._watch is not None:
            self._watch.mark(phase)

    def sum(self, value: Tensor) -> Tensor:
        """The sum of a tensor over ranks."""
        total = value.detach().clone().to(self.device)
        if self.world == 1:  # a lone rank would wait for gloo's thread
            return total
        with self._waiting():
            dist.all_reduce(total)
        return total

    def max(self, value: int) -> int:
        tensor = torch.tensor(int(value), device=self.device)
        with self._waiting():
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
            return int(tensor)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in rank order: plain values, tensors, arrays, images and dataclasses of them, for
        small things. They go over the hosts' network: over NCCL they would pass through every GPU, and those would spin
        while one rank is late. Raises UserError for another value."""
        if self.world == 1:  # there is nobody to write it for
            return [value]
        message = pack(value)
        with self._waiting():
            messages = gather_messages(message, self.world, self._objects)
        return [value if rank == self.rank else unpack(one) for rank, one in enumerate(messages)]

    def exchange(self, values: list[Any], instead: str) -> list[Any]:
        """Sends each rank its value, and returns those that all ranks have for this one, in rank order. values: one a
        rank, as for `gather`; they may be large, for each goes to its rank alone. Raises UserError for what can not be
        sent; it names `instead`, the setting without this exchange."""
        nothing = torch.empty(0, dtype=torch.uint8)
        messages = [nothing if rank == self.rank else pack(value, instead) for rank, value in enumerate(values)]
        with self._waiting():
            arrived = exchange_messages(messages, self._objects)
        return [values[rank] if rank == self.rank else unpack(one) for rank, one in enumerate(arrived)]

    def barrier(self) -> None:
        with self._waiting():
            dist.barrier()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self.mark()
        started = time.perf_counter()
        yield
        self.waited += time.perf_counter() - started

    def close(self) -> None:
        """Leaves the process group in order; without this gloo's thread aborts the interpreter at exit.

        Called while an exception unwinds it waits for no other rank: they may be in the middle of a step, and the
        launcher ends them once this one has ended.
        """
        if self._watch is not None:
            self._watch.close()
            self._watch = None
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
        self, module: nn.Module, optim: Optim, settings: EngineSettings, *, total_steps: int = 1, dtype: str = "float32"
    ) -> None:
        """total_steps: optimizer steps of the whole run, for schedules. dtype: of the module's weights."""
        super().__init__(settings.timeout)
        self.zero_stage = settings.zero_stage
        self._trained = [p for p in module.parameters() if p.requires_grad]
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        self.updates = 0  # optimizer steps taken, skipped ones not counted
        self.lr_factor = 1.0  # what a guard has left of the learning rates
        groups, self._rates = parameter_groups(module, optim, total_steps)
        names = {parameter: name for name, parameter in module.named_parameters()}
        self._by_name = {names[p]: p for group in groups for p in group["params"]}  # in the optimizer's order
        guard_clip = optim.clip_grad_norm if self.zero_stage == 0 else None
        self._moments = optim.moments
        self._optimizer = guarded(optim.kind())(groups, lr=optim.lr, clip_grad_norm=guard_clip, **optim.options)
        self._engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=self._optimizer,
            config=self._deepspeed_config(
                0.0 if guard_clip is not None else optim.clip_grad_norm, settings.offload, dtype
            ),
        )
        self.alone = self.world == 1 and self.zero_stage == 0
        if self.alone:  # it would copy all gradients into a buffer, wait for gloo's thread, and copy them back
            self._engine.enable_backward_allreduce = False

    def _deepspeed_config(self, clip_grad_norm: float, offload: str, dtype: str) -> dict[str, Any]:
        """Returns DeepSpeed's configuration. offload: none, optimizer or all; dtype: float32 or bfloat16."""
        # Sums of gradients over NCCL go on beside the backward pass; gloo would take its processor from it. DeepSpeed
        # refuses it below stage 2 where the caller owns the accumulation.
        overlaps = dist.get_backend() == "nccl" and self.zero_stage >= 2
        zero: dict[str, Any] = {"stage": self.zero_stage, "overlap_comm": overlaps}
        if offload != "none":
            zero["offload_optimizer"] = {"device": "cpu"}
        if offload == "all":
            zero["offload_param"] = {"device": "cpu"}
        # Micro-batches' gradients that are summed in bf16 lose a per cent in a hundred of them.
        sums = {"grad_accum_dtype": "fp32"} if accumulates_in_fp32(self.zero_stage, dtype) else {}
        if self.zero_stage == 3:
            zero["stage3_gather_16bit_weights_on_model_save"] = True
        return {
            "train_micro_batch_size_per_gpu": 1,  # a formality: the caller owns batches
            "managed_gradient_accumulation": False,
            "gradient_clipping": clip_grad_norm,
            "zero_optimization": zero,
            "bf16": {"enabled": dtype == "bfloat16"},
            "data_types": sums,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": None,
        }

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self._engine(*args, **kwargs)

    @property
    def lr(self) -> float:
        """The learning rate of parameters in no named group."""
        return self.lr_factor * self._rates[0](self.updates)

    # --- one optimizer step ---

    def backward(self, loss: Tensor) -> None:
        self.mark()
        # DeepSpeed averages gradients over ranks; the global denominator asks for their sum.
        self._engine.backward(loss * self.world, scale_wrt_gas=False)

    def step(self) -> tuple[bool, float]:
        """Clips, updates, clears gradients. Returns whether weights changed, and the gradient's norm before clipping
        (not finite when the update was skipped)."""
        self.mark()
        for group, rate in zip(self._engine.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = self.lr_factor * rate(self.updates)
        if self.alone:
            for parameter in self._trained:
                if parameter.grad is None:  # 0, as among several ranks, of which another one may have something
                    parameter.grad = torch.zeros_like(parameter)
        self._engine.step()
        applied = not self._engine.optimizer.overflow
        self.updates += applied
        return applied, float(self._engine.get_global_grad_norm())

    @torch.no_grad()
    def reset_optimizer(self) -> None:
        """Sets moments and counts of steps to 0, as before the first step. Learning rates go on."""
        for state in self._optimizer.state.values():  # which ZeRO's optimizers step and save too
            for name, value in state.items():
                state[name] = value.zero_() if isinstance(value, Tensor) else 0

    @contextmanager
    def gathered_weights(self) -> Iterator[None]:
        """Context in which every rank has all weights, also under ZeRO-3, and its passes of the network are not
        collectives. For passes without gradient. A collective at both ends."""
        with unwrap_model_for_generation(self._engine) if self.zero_stage == 3 else nullcontext():
            yield

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

    def finite(self) -> bool:
        """Returns whether all trained weights of all ranks are finite. A collective."""
        finite = all(bool(local_part(p).isfinite().all()) for p in self._trained)
        return self.max(not finite) == 0

    @cached_property
    def frozen_digest(self) -> str:
        """A digest of the weights that are not trained, equal for all ranks and ZeRO stages. A collective the first
        time."""
        sums = self.sum(torch.stack([torch.tensor(0), *(self._bits(p) for p in self._frozen)]))
        return hashlib.sha256(str(sums.tolist()).encode()).hexdigest()

    def _bits(self, parameter: nn.Parameter) -> Tensor:
        """This rank's part of the sum of a parameter's bit patterns, modulo 2^64."""
        if self.rank > 0 and self.zero_stage < 3:  # every rank has all of it
            return torch.tensor(0)
        local = local_part(parameter).detach().flatten()
        return local.view(BITS[local.element_size()]).sum(dtype=torch.int64).cpu()

    @property
    def saved_bytes(self) -> int:
        """A lower bound of what this rank writes into a checkpoint: weights, the optimizer's fp32 copies and
        moments."""
        shared = self.world if self.zero_stage in (1, 2) else 1  # under ZeRO-3 a rank has its share of all
        optimizer = 4 * (1 + len(self._moments)) / shared
        return int(sum(local_part(p).numel() * (p.element_size() + optimizer) for p in self._trained))

    def save(self, folder: Path, write: files.Write) -> None:
        """Hands weights, optimizer and step count of this rank to `write`, as files below `folder` (DeepSpeed's
        format); weights that are not trained are left out. A collective, so `write` raises nothing: the others would
        wait.
        """
        files.save(self._engine, folder, {"updates": self.updates}, write)

    def load(self, folder: Path, zero_stage: int, ranks: int) -> None:
        """Loads what `save` wrote on `ranks` ranks under `zero_stage`. Raises UserError if a file holds more than
        tensors and plain values."""
        if zero_stage == self.zero_stage and (ranks == self.world or zero_stage == 0):
            self.updates = files.load(self._engine, folder)["updates"]
            return
        with files.weights_only(folder):
            tag, now = folder / files.TAG, self.zero_stage
            state = reshape.load(self._engine, tag, zero_stage, ranks, now, self._moments, self._by_name)
        self.updates = state["updates"]

    def reshaped(self, states: list[dict[str, Tensor]], zero_stage: int) -> dict[str, Tensor]:
        """This rank's state of an average, from those that all ranks saved under `zero_stage`."""
        return reshaped(states, zero_stage == 3, self._trained)

    def release(self) -> None:
        """Gives up weights and optimizer. Before an engine for generation is closed: that may end the process group,
        which DeepSpeed still asks here under ZeRO-3."""
        if self._engine is not None:
            self._engine.destroy()
            self._engine = None
            gc.collect()

    def close(self) -> None:
        self.release()
        super().close()


def start_distributed(timeout: float) -> None:
    """Joins the launcher's process group; without a launcher, a group of one on a free port. Raises torch's errors of a
    store where ranks have not met `timeout` seconds later."""
    if dist.is_initialized():
        return
    end_with_launcher()
    select_device()
    if "RANK" not in os.environ:
        alone = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": ANY_PORT,
        }
        os.environ.update(alone)
    with gloo_on_loopback():
        deepspeed.init_distributed(verbose=False, timeout=timedelta(seconds=timeout + LATER), init_method=INIT_METHOD)


def objects_group(timeout: float) -> dist.ProcessGroup | None:
    """A gloo group of all ranks, whose collectives stay on the hosts; None where the default group is one. A
    collective."""
    if dist.get_backend() == "gloo":
        return None
    with gloo_on_loopback():
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout + LATER))


def gathered_parameters(parameters: list[nn.Parameter]) -> AbstractContextManager[None]:
    """Context in which parameters are whole also where ZeRO-3 keeps a slice on each rank (a collective then)."""
    split = [p for p in parameters if "ds_id" in vars(p)]
    return deepspeed.zero.GatheredParameters(split) if split else nullcontext()
