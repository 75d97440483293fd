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

import deepspeed  # noqa: E402  (reads DS_ACCELERATOR when it is imported)
from deepspeed.runtime.zero import unwrap_model_for_generation  # noqa: E402

from mmrl.engine import files, reshape  # noqa: E402
from mmrl.engine.compilation import CompiledBlocks  # noqa: E402
from mmrl.engine.ema import local_part, reshard  # noqa: E402
from mmrl.engine.heartbeat import Heartbeat  # noqa: E402
from mmrl.engine.launcher import ANY_PORT, INIT_METHOD, end_with_launcher, gloo_on_loopback, select_device  # noqa: E402
from mmrl.engine.memory import accumulates_in_fp32  # noqa: E402
from mmrl.engine.packing import exchange_messages, gather_messages, pack, unpack  # noqa: E402

T = TypeVar("T")
# Seconds that torch's collectives wait longer than engine.timeout, so that the heartbeat can name a missing rank first
EXTRA_TIMEOUT_S = 60.0
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer dtype by size in bytes

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # names that DeepSpeed uses
# Shared-memory all-reduce for CPU ranks would be compiled at the first start (half a minute) and gains nothing here.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class GuardedOptimizer(torch.optim.Optimizer):
    """A mixin for torch's optimizers that clips gradients and skips the step if the gradient's norm is not finite.

    ZeRO's optimizers do both themselves; without ZeRO, where `clip_grad_norm` is given, this class does. Gradients are
    already summed over ranks, so all ranks decide alike. Attributes have the names that DeepSpeed reads from its own
    optimizers.
    """

    def __init__(self, *args: Any, clip_grad_norm: float | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.clip_grad_norm = clip_grad_norm
        self.overflow = False
        self._global_grad_norm = 0.0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Clips the gradient's norm to `clip_grad_norm` (0: no clipping) and takes a step. Without a finite norm it
        sets `overflow` and takes none. If `clip_grad_norm` is None, ZeRO does all this."""
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


def guarded(optimizer: type[torch.optim.Optimizer]) -> Callable[..., GuardedOptimizer]:
    """Returns a subclass of an optimizer class with `GuardedOptimizer` as mixin."""
    return type(f"Guarded{optimizer.__name__}", (GuardedOptimizer, optimizer), {})


def learning_rate(step: int, *, lr: float, warmup: int, schedule: str, total: int, hold: int = 0) -> float:
    """Returns the learning rate at optimizer step `step` (from 0).

    It is 0 for the first `hold` steps, then rises linearly to `lr` in `warmup` steps. After that it follows `schedule`:
    "constant", or "linear" or "cosine", which fall to 0 at step `total`."""
    if step < hold:
        return 0.0
    step, total = step - hold, total - hold
    if step < warmup:
        return lr * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    if schedule == "linear":
        return lr * (1 - progress)
    return lr * (1 + math.cos(math.pi * progress)) / 2 if schedule == "cosine" else lr


def parameter_groups(
    module: nn.Module, optim: Optim, total: int
) -> tuple[list[dict[str, Any]], list[Callable[[int], float]]]:
    """Returns the optimizer's parameter groups, and for each a function from the optimizer step (from 0) to the
    learning rate.

    A parameter is in the named group `optim.groups[name]` if its own name begins with "name."; parameters in no named
    group come first. Weight decay applies to tensors of two or more dimensions, not to biases and scales of norms.
    total: optimizer steps of the run.
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
    """Returns the named group of a parameter, by its name; "" if it is in none."""
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
        """Returns the device that tensors of a collective must be on."""
        return (
            torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
        )

    def watch(self, heartbeat: Heartbeat) -> None:
        """Sets the heartbeat by which ranks watch each other. Collectives are marked in it, and `close` closes it."""
        self._watch = heartbeat

    def mark(self, phase: str | None = None) -> None:
        """Records in the heartbeat that this rank begins `phase`, which error messages name, or, if `phase` is None,
        the next collective of the current phase. Every rank must call it at the same points."""
        if self._watch is not None:
            self._watch.mark(phase)

    def sum(self, value: Tensor) -> Tensor:
        """Returns the sum of a tensor over ranks. A collective."""
        total = value.detach().clone().to(self.device)
        if self.world == 1:  # a lone rank would wait for gloo's thread
            return total
        with self._waiting():
            dist.all_reduce(total)
        return total

    def max(self, value: int) -> int:
        """Returns the maximum of a number over ranks. A collective."""
        tensor = torch.tensor(int(value), device=self.device)
        with self._waiting():
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
            return int(tensor)

    def gather(self, value: T) -> list[T]:
        """Returns the values of all ranks, in rank order. A collective, for small values: plain ones, tensors, arrays,
        images and dataclasses of these. They are sent by gloo over the hosts' network, since with NCCL the GPUs would
        spin while one rank is late. Raises UserError for a value of another type."""
        if self.world == 1:  # saves the serialization
            return [value]
        message = pack(value)
        with self._waiting():
            messages = gather_messages(message, self.world, self._objects)
        return [value if rank == self.rank else unpack(received) for rank, received in enumerate(messages)]

    def exchange(self, values: list[Any], instead: str) -> list[Any]:
        """Sends each rank a value of its own (all-to-all). Returns the values that all ranks sent to this one, in rank
        order. A collective.

        values: one for each rank, of the types of `gather`; they may be large. instead: the setting that avoids this
        exchange, which the error names. Raises UserError for a value that cannot be sent.
        """
        empty = torch.empty(0, dtype=torch.uint8)
        messages = [empty if rank == self.rank else pack(value, instead) for rank, value in enumerate(values)]
        with self._waiting():
            received = exchange_messages(messages, self._objects)
        return [values[rank] if rank == self.rank else unpack(message) for rank, message in enumerate(received)]

    def barrier(self) -> None:
        with self._waiting():
            dist.barrier()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Marks the collective in the block in the heartbeat, and adds its duration to `waited`."""
        self.mark()
        started = time.perf_counter()
        yield
        self.waited += time.perf_counter() - started

    def close(self) -> None:
        """Leaves the process group; without this, gloo's thread aborts the interpreter at exit.

        During the handling of an exception it does not wait for other ranks. They may be in the middle of a step, and
        the launcher ends them once this process has ended.
        """
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if not dist.is_initialized():  # a vLLM engine in this process has destroyed the group
            return
        if sys.exc_info()[0] is None:
            dist.barrier()
        deepspeed.comm.destroy_process_group()  # torch's own, and the groups that DeepSpeed remembers


class Engine(Ranks):
    """Wraps a module for training by DeepSpeed. It is called like the module.

    An update is any number of `backward` calls, one for each micro-batch, and then one `step`. Each loss must already
    be divided by its *global* denominator (see `mmrl.core.reduce`), since gradients are summed over micro-batches and
    ranks. So the gradient does not depend on how a batch is split.
    """

    def __init__(
        self, module: nn.Module, optim: Optim, settings: EngineSettings, *, total_steps: int = 1, dtype: str = "float32"
    ) -> None:
        """total_steps: optimizer steps of the whole run, for schedules. dtype: the dtype of the module's weights."""
        super().__init__(settings.timeout)
        self.zero_stage = settings.zero_stage
        self._trained = [p for p in module.parameters() if p.requires_grad]
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        self.updates = 0  # optimizer steps taken, skipped ones not counted
        self.lr_factor = 1.0  # factor of all learning rates, which guards may lower
        self._compiled = None if settings.compile == "none" else CompiledBlocks(module, settings.compile)
        groups, self._rates = parameter_groups(module, optim, total_steps)
        names = {parameter: name for name, parameter in module.named_parameters()}
        self._by_name = {names[p]: p for group in groups for p in group["params"]}  # in the optimizer's order
        guard_clip = optim.clip_grad_norm if self.zero_stage == 0 else None
        self._moments = optim.moments
        optimizer_class = guarded(optim.kind())
        self._optimizer = optimizer_class(groups, lr=optim.lr, clip_grad_norm=guard_clip, **optim.options)
        self._engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=self._optimizer,
            config=self._deepspeed_config(
                0.0 if guard_clip is not None else optim.clip_grad_norm, settings.offload, dtype
            ),
        )
        self.single_rank = self.world == 1 and self.zero_stage == 0
        if self.single_rank:  # DeepSpeed would copy all gradients into a buffer, wait for gloo, and copy them back
            self._engine.enable_backward_allreduce = False

    def _deepspeed_config(self, clip_grad_norm: float, offload: str, dtype: str) -> dict[str, Any]:
        """Returns DeepSpeed's configuration. offload: none, optimizer or all; dtype: float32 or bfloat16."""
        # With NCCL, gradients are summed during the backward pass; gloo would compete with it for the CPU. DeepSpeed
        # refuses this below stage 2 where the caller controls accumulation.
        overlaps = dist.get_backend() == "nccl" and self.zero_stage >= 2
        zero: dict[str, Any] = {"stage": self.zero_stage, "overlap_comm": overlaps}
        if offload != "none":
            zero["offload_optimizer"] = {"device": "cpu"}
        if offload == "all":
            zero["offload_param"] = {"device": "cpu"}
        # Summed in bf16, gradients of a hundred micro-batches lose about a percent.
        sums = {"grad_accum_dtype": "fp32"} if accumulates_in_fp32(self.zero_stage, dtype) else {}
        if self.zero_stage == 3:
            zero["stage3_gather_16bit_weights_on_model_save"] = True
        return {
            "train_micro_batch_size_per_gpu": 1,  # required but without effect: the caller makes the batches
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
        if self._compiled is None:
            return self._engine(*args, **kwargs)
        return self._compiled.call(self._engine, *args, **kwargs)

    @property
    def lr(self) -> float:
        """Returns the current learning rate of parameters that are in no named group."""
        return self.lr_factor * self._rates[0](self.updates)

    # --- one optimizer step ---

    def backward(self, loss: Tensor) -> None:
        """Computes the gradients of a micro-batch's loss and adds them to the gradients of earlier micro-batches."""
        self.mark()
        with nullcontext() if self._compiled is None else self._compiled.running():  # where activations are recomputed
            # DeepSpeed averages gradients over ranks; with a global denominator their sum is right.
            self._engine.backward(loss * self.world, scale_wrt_gas=False)

    def step(self) -> tuple[bool, float]:
        """Clips the accumulated gradient, updates the weights and sets the gradient to 0. Returns whether weights
        changed, and the gradient's norm before clipping. An update whose norm is not finite is skipped."""
        self.mark()
        for group, rate in zip(self._engine.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = self.lr_factor * rate(self.updates)
        if self.single_rank:
            for parameter in self._trained:
                if parameter.grad is None:  # 0 rather than None, as it is after a sum over several ranks
                    parameter.grad = torch.zeros_like(parameter)
        self._engine.step()
        applied = not self._engine.optimizer.overflow
        self.updates += applied
        return applied, float(self._engine.get_global_grad_norm())

    @torch.no_grad()
    def reset_optimizer(self) -> None:
        """Sets the optimizer's moments and step counts to 0, as before the first step. Learning-rate schedules are not
        reset."""
        for state in self._optimizer.state.values():  # ZeRO's optimizers use this state too
            for name, value in state.items():
                state[name] = value.zero_() if isinstance(value, Tensor) else 0

    @contextmanager
    def gathered_weights(self) -> Iterator[None]:
        """A context in which every rank holds all weights, also under ZeRO-3, so that a forward pass without gradient
        needs no other rank. Entering and leaving it are collectives."""
        with unwrap_model_for_generation(self._engine) if self.zero_stage == 3 else nullcontext():
            yield

    # --- files ---

    def state(self) -> dict[str, Tensor]:
        """Returns the full weights of the module by name, on the CPU of rank 0, and {} on other ranks. A collective."""
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
        """Returns a checksum of the weights that are not trained, the same on all ranks and for all ZeRO stages. The
        first call is a collective."""
        # the 0: stack needs at least one tensor
        sums = self.sum(torch.stack([torch.tensor(0), *(self._sum_bits(p) for p in self._frozen)]))
        return hashlib.sha256(str(sums.tolist()).encode()).hexdigest()

    def _sum_bits(self, parameter: nn.Parameter) -> Tensor:
        """Returns this rank's contribution to the sum of a parameter's bit patterns, read as integers, modulo 2^64."""
        if self.rank > 0 and self.zero_stage < 3:  # rank 0 holds all of it too and sums it
            return torch.tensor(0)
        local = local_part(parameter).detach().flatten()
        return local.view(INTEGERS[local.element_size()]).sum(dtype=torch.int64).cpu()

    @property
    def saved_bytes(self) -> int:
        """Returns a lower bound of the bytes that this rank writes into a checkpoint: weights, and the optimizer's fp32
        weights and moments."""
        shards = self.world if self.zero_stage in (1, 2) else 1  # under ZeRO-3 `local_part` is a shard already
        optimizer = 4 * (1 + len(self._moments)) / shards
        return int(sum(local_part(p).numel() * (p.element_size() + optimizer) for p in self._trained))

    def save(self, folder: Path, write: files.Write) -> None:
        """Writes this rank's part of a checkpoint in DeepSpeed's format: trained weights, optimizer and step count.

        write: called with each object and its path below `folder`. A collective, so `write` must not raise: the other
        ranks would wait.
        """
        files.save(self._engine, folder, {"updates": self.updates}, write)

    def load(self, folder: Path, zero_stage: int, ranks: int) -> None:
        """Loads a checkpoint that `save` wrote with `ranks` ranks and ZeRO stage `zero_stage`; the current number of
        ranks and stage may differ. Raises UserError if a file holds more than tensors and plain values."""
        if zero_stage == self.zero_stage and (ranks == self.world or zero_stage == 0):
            self.updates = files.load(self._engine, folder)["updates"]
            return
        with files.weights_only(folder):
            tag, stage = folder / files.TAG, self.zero_stage
            state = reshape.load(self._engine, tag, zero_stage, ranks, stage, self._moments, self._by_name)
        self.updates = state["updates"]

    def reshard(self, states: list[dict[str, Tensor]], zero_stage: int) -> dict[str, Tensor]:
        """Returns this rank's state of an `EMA` or `Snapshot` from the states of all ranks that saved a checkpoint
        under ZeRO stage `zero_stage`."""
        return reshard(states, zero_stage == 3, self._trained)

    def release(self) -> None:
        """Frees weights and optimizer. To be called before a vLLM engine is closed: that may destroy the process group,
        which DeepSpeed still uses here under ZeRO-3."""
        if self._engine is not None:
            self._engine.destroy()
            self._engine = None
            gc.collect()

    def close(self) -> None:
        self.release()
        super().close()


def start_distributed(timeout: float) -> None:
    """Joins the process group of the launcher (torchrun); without a launcher, makes a group of one rank. Raises the
    errors `NOT_MET` of torch where not all ranks have connected after `timeout` seconds."""
    if dist.is_initialized():
        return
    end_with_launcher()
    select_device()
    if "RANK" not in os.environ:
        single_rank = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": ANY_PORT,
        }
        os.environ.update(single_rank)
    limit = timedelta(seconds=timeout + EXTRA_TIMEOUT_S)
    with gloo_on_loopback():
        deepspeed.init_distributed(verbose=False, timeout=limit, init_method=INIT_METHOD)


def objects_group(timeout: float) -> dist.ProcessGroup | None:
    """Returns a gloo group of all ranks, for collectives of objects on CPUs; None where the default group is a gloo
    group. A collective."""
    if dist.get_backend() == "gloo":
        return None
    with gloo_on_loopback():
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout + EXTRA_TIMEOUT_S))


def gathered_parameters(parameters: list[nn.Parameter]) -> AbstractContextManager[None]:
    """Returns a context in which these parameters are complete on every rank, also under ZeRO-3, where it is a
    collective."""
    sharded = [p for p in parameters if "ds_id" in vars(p)]
    return deepspeed.zero.GatheredParameters(sharded) if sharded else nullcontext()
