"""A checkpoint of DeepSpeed's loaded by another number of ranks, or another ZeRO stage.

DeepSpeed's own way (its universal checkpoint) is not used: it can not go from stage 2 to 3, gives every parameter group
the options of the first one when it loads stage 3, and opens pickles. Here each tensor is put together from the pieces
that the ranks wrote, which stay on the disk until then, and this rank keeps its part, by the parameter's name; so the
largest parameter decides the memory that is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.utils import (
    lazy_init_hp_params_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn

from mmrl.engine.ema import gather_again, local_part, take

MASTER = "fp32"  # the weights that the optimizer steps; beside them its moments
STEP = "step"  # the optimizer's count of its steps, where it has one
Moments = tuple[str, ...]  # names of tensors, see `settings.Optim.moments`
Trained = Mapping[str, nn.Parameter]  # by name, in the order of the optimizer's groups
Piece = dict[str, Tensor]  # of one parameter: weights and moments, flat
Whole = Callable[[str, str], Tensor]  # (name of a parameter, MASTER or a moment) -> the whole tensor, flat
States = dict[int, dict[str, Any]]  # of an optimizer, by the index of the tensor that it steps


@torch.no_grad()
def load(
    engine: DeepSpeedEngine, folder: Path, zero_stage: int, ranks: int, now: int, moments: Moments, trained: Trained
) -> dict[str, Any]:
    """Loads weights and optimizer from the files in `folder`, which `ranks` ranks wrote under `zero_stage`, into
    DeepSpeed's engine, which runs under stage `now`; returns the state that was saved with them. moments: of the
    optimizer, the same before and now."""
    model = [read(path) for path in sorted(folder.glob("*model_states.pt"), key=rank_of)]
    optimizer = [read(path)["optimizer_state_dict"] for path in sorted(folder.glob("*optim_states.pt"), key=rank_of)]
    assert len(optimizer) == (ranks if zero_stage > 0 else 0)
    if zero_stage == 0:
        pieces, states = unsharded(model[0], list(trained), moments)
    elif zero_stage == 3:
        pieces, states = sharded_weights(optimizer, model[0]["param_shapes"], moments)
    else:
        pieces, states = sharded_optimizer(optimizer, moments)

    def whole(name: str, key: str) -> Tensor:
        return torch.cat([piece[key] for piece in pieces[name]])

    begin(engine, now, states)
    install = {0: into_plain, 3: into_sharded_weights}.get(now, into_sharded_optimizer)
    install(engine, trained, whole, moments)
    buffers = dict(engine.module.named_buffers())
    for name in buffers.keys() & model[0]["module"].keys():
        buffers[name].copy_(model[0]["module"][name])
    engine.global_steps, engine.skipped_steps = model[0]["global_steps"], model[0]["skipped_steps"]
    return model[0]


def read(path: Path) -> dict[str, Any]:
    """Opens a file; its tensors are mapped, and read when they are used."""
    return torch.load(str(path), map_location="cpu", mmap=True)


def rank_of(path: Path) -> int:
    parts = path.name.split("_")
    return int(parts[parts.index("pp") + 2]) if "pp" in parts else 0


# --- reading ---


def unsharded(model: dict[str, Any], names: Sequence[str], moments: Moments) -> tuple[dict[str, list[Piece]], States]:
    """Reads ZeRO 0's checkpoint: one file holds everything. Of weights in bfloat16 DeepSpeed keeps fp32 ones here too,
    `fp32_groups`."""
    optimizer = model["optimizer"]
    if "fp32_groups" in optimizer:
        states = optimizer["optimizer_state_dict"]["state"]
        masters = [master for group in optimizer["fp32_groups"] for master in group]
    else:
        states, masters = optimizer["state"], [model["module"][name] for name in names]
    pieces = {
        name: [{MASTER: master.flatten(), **{key: states[index][key].flatten() for key in moments}}]
        for index, (name, master) in enumerate(zip(names, masters, strict=True))
    }
    return pieces, states


def sharded_optimizer(optimizer: list[dict[str, Any]], moments: Moments) -> tuple[dict[str, list[Piece]], States]:
    """Reads optimizer state sharded by ZeRO 1 or 2: each rank holds a contiguous slice of the flattened group."""
    pieces: dict[str, list[Piece]] = {}
    for rank in optimizer:
        states, masters = rank["base_optimizer_state"]["state"], rank["single_partition_of_fp32_groups"]
        for group, addresses in enumerate(rank["param_slice_mappings"]):
            flat = {MASTER: masters[group], **{key: states[group][key] for key in moments}}
            for name, address in addresses.items():
                piece = {key: values.narrow(0, address.start, address.numel) for key, values in flat.items()}
                pieces.setdefault(name, []).append(piece)
    return pieces, optimizer[0]["base_optimizer_state"]["state"]


def sharded_weights(
    optimizer: list[dict[str, Any]], shapes: list[dict[str, torch.Size]], moments: Moments
) -> tuple[dict[str, list[Piece]], States]:
    """Reads weights sharded by ZeRO 3: each rank has a slice of each parameter, all of one length; the last ones are
    padded."""
    pieces: dict[str, list[Piece]] = {}
    for rank, state in enumerate(optimizer):
        for group, group_shapes in enumerate(shapes):
            states = state["optimizer_state_dict"]["state"]
            flat = {MASTER: state["fp32_flat_groups"][group], **{key: states[group][key] for key in moments}}
            start = 0
            for name, shape in group_shapes.items():
                size = -(-shape.numel() // len(optimizer))
                length = max(0, min(size, shape.numel() - rank * size))
                piece = {key: values.narrow(0, start, length) for key, values in flat.items()}
                pieces.setdefault(name, []).append(piece)
                start += size
    return pieces, optimizer[0]["optimizer_state_dict"]["state"]


# --- installing ---


def begin(engine: DeepSpeedEngine, now: int, states: States) -> None:
    """Makes an optimizer that has not stepped yet keep its moments, as many steps counted as in `states`: by a step
    without gradient, so that they lie where it wants them. All weights are overwritten afterwards."""
    optimizer = engine.basic_optimizer
    stepped = masters(engine, now)
    groups, gradients = optimizer.param_groups, [master.grad for master in stepped]
    optimizer.param_groups = [{**groups[0], "params": stepped}]
    for master in stepped:
        master.grad = torch.zeros_like(master)
    optimizer.step()
    optimizer.param_groups = groups
    for master, gradient in zip(stepped, gradients, strict=True):
        master.grad = gradient
        if STEP in optimizer.state[master]:
            optimizer.state[master][STEP].fill_(float(states[0][STEP]))


def masters(engine: DeepSpeedEngine, now: int) -> list[Tensor]:
    """The tensors that the optimizer steps on this rank: fp32 weights, flat but under stage 0."""
    if now == 3:
        return engine.optimizer.fp32_partitioned_groups_flat
    return [master for group in engine.optimizer.param_groups for master in group["params"]]


def into_plain(engine: DeepSpeedEngine, trained: Trained, whole: Whole, moments: Moments) -> None:
    """Installs a state under ZeRO 0. The tensor that is stepped is the parameter itself, or an fp32 copy of one in
    bfloat16."""
    for (name, parameter), master in zip(trained.items(), masters(engine, now=0), strict=True):
        parameter.copy_(whole(name, MASTER).view_as(parameter))
        master.copy_(whole(name, MASTER).view_as(parameter))
        for key in moments:
            engine.optimizer.state[master][key].copy_(whole(name, key).view_as(parameter))


def into_sharded_optimizer(engine: DeepSpeedEngine, trained: Trained, whole: Whole, moments: Moments) -> None:
    """Installs a state under ZeRO 1 or 2."""
    optimizer = engine.optimizer
    for parameters, group in zip(optimizer.bit16_groups, optimizer.param_groups, strict=True):
        lazy_init_hp_params_optimizer_state(parameters, group["params"][0], optimizer.state)
    for name, parameter in trained.items():
        safe_set_full_fp32_param(parameter, whole(name, MASTER))
        for key in moments:
            safe_set_full_optimizer_state(parameter, whole(name, key), key)
    optimizer.update_lp_params()


def into_sharded_weights(engine: DeepSpeedEngine, trained: Trained, whole: Whole, moments: Moments) -> None:
    """Installs a state under ZeRO 3. `whole` puts a parameter or a moment together, [element]; `take` cuts this rank's
    slice out of it, which is copied to `local_part`, the memory of that slice (bfloat16 or fp32). The optimizer's fp32
    weights and moments are padded slices."""
    for name, parameter in trained.items():
        local_part(parameter).copy_(take(parameter, whole(name, MASTER)))
        safe_set_local_fp32_param(parameter, padded(parameter, whole(name, MASTER)))
        for key in moments:
            safe_set_local_optimizer_state(parameter, padded(parameter, whole(name, key)), key)
    gather_again(list(trained.values()))


def padded(parameter: nn.Parameter, whole: Tensor) -> Tensor:
    """This rank's slice of a parameter, as long as on every rank."""
    slice_ = take(parameter, whole)
    return nn.functional.pad(slice_, (0, vars(parameter)["ds_tensor"].numel() - slice_.numel()))
