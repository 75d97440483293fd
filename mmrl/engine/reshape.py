"""Loads a DeepSpeed checkpoint that was written by another number of ranks or under another ZeRO stage.

DeepSpeed's universal checkpoint is not used: it cannot go from stage 2 to 3, gives every parameter group the options of
the first one when it loads stage 3, and opens pickles. Here each tensor is assembled from the pieces that the ranks
wrote, one parameter at a time, and this rank keeps its part. So the largest parameter decides the memory needed.
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

from mmrl.engine.ema import local_part, refresh_gathered, take_shard

MASTER = "fp32"  # key of the fp32 weights that the optimizer updates, beside the names of its moments
STEP = "step"  # key of the optimizer's step count, where it has one
Moments = tuple[str, ...]  # names of the optimizer's moments, see `settings.Optim.moments`
Trained = Mapping[str, nn.Parameter]  # trained parameters by name, in the order of the optimizer's groups
Piece = dict[str, Tensor]  # a rank's part of one parameter: flat tensors by MASTER and the names of moments
Assemble = Callable[[str, str], Tensor]  # (parameter name, MASTER or a moment) -> the full tensor, flat
States = dict[int, dict[str, Any]]  # an optimizer's state, by the index of the tensor that it updates


@torch.no_grad()
def load(
    engine: DeepSpeedEngine, folder: Path, zero_stage: int, ranks: int, stage: int, moments: Moments, trained: Trained
) -> dict[str, Any]:
    """Loads weights and optimizer into DeepSpeed's engine. Returns the state that was saved with them.

    folder: holds the files of a checkpoint that `ranks` ranks wrote under ZeRO stage `zero_stage`. stage: the current
    ZeRO stage. moments: names of the optimizer's moments; the checkpoint has the same.
    """
    model = [read(path) for path in sorted(folder.glob("*model_states.pt"), key=rank_of)]
    optimizer = [read(path)["optimizer_state_dict"] for path in sorted(folder.glob("*optim_states.pt"), key=rank_of)]
    assert len(optimizer) == (ranks if zero_stage > 0 else 0)
    if zero_stage == 0:
        pieces, states = unsharded(model[0], list(trained), moments)
    elif zero_stage == 3:
        pieces, states = sharded_weights(optimizer, model[0]["param_shapes"], moments)
    else:
        pieces, states = sharded_optimizer(optimizer, moments)

    def assemble(name: str, key: str) -> Tensor:
        """Returns the flat fp32 weights (key MASTER) or a moment of the parameter `name`, joined from all ranks."""
        return torch.cat([piece[key] for piece in pieces[name]])

    allocate_moments(engine, stage, states)
    install = {0: into_plain, 3: into_sharded_weights}.get(stage, into_sharded_optimizer)
    install(engine, trained, assemble, moments)
    buffers = dict(engine.module.named_buffers())
    for name in buffers.keys() & model[0]["module"].keys():
        buffers[name].copy_(model[0]["module"][name])
    engine.global_steps, engine.skipped_steps = model[0]["global_steps"], model[0]["skipped_steps"]
    return model[0]


def read(path: Path) -> dict[str, Any]:
    """Loads a file. Its tensors are memory-mapped, so that they are read from the disk when they are used."""
    return torch.load(str(path), map_location="cpu", mmap=True)


def rank_of(path: Path) -> int:
    """Returns the rank that wrote a file of DeepSpeed, from its name; 0 where the name has none."""
    parts = path.name.split("_")  # as in zero_pp_rank_3_mp_rank_00_optim_states.pt
    return int(parts[parts.index("pp") + 2]) if "pp" in parts else 0


# --- reading ---


def unsharded(model: dict[str, Any], names: Sequence[str], moments: Moments) -> tuple[dict[str, list[Piece]], States]:
    """Reads a checkpoint of ZeRO 0, in which one file holds everything. For bfloat16 weights it also holds fp32 copies,
    `fp32_groups`. Returns the pieces by parameter name, and the optimizer's state."""
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
    """Reads a checkpoint of ZeRO 1 or 2, in which each rank has a contiguous slice of the flattened parameter group.
    Returns the pieces by parameter name in rank order, and the optimizer's state of rank 0."""
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
    """Reads a checkpoint of ZeRO 3, in which each rank has a slice of each parameter. All slices have the same length;
    the last ones are padded. shapes: for each parameter group, the shapes of the full parameters by name. Returns the
    pieces by parameter name in rank order, without padding, and the optimizer's state of rank 0."""
    pieces: dict[str, list[Piece]] = {}
    for rank, state in enumerate(optimizer):
        for group, group_shapes in enumerate(shapes):
            states = state["optimizer_state_dict"]["state"]
            flat = {MASTER: state["fp32_flat_groups"][group], **{key: states[group][key] for key in moments}}
            start = 0
            for name, shape in group_shapes.items():
                size = -(-shape.numel() // len(optimizer))  # length of a slice with its padding
                length = max(0, min(size, shape.numel() - rank * size))
                piece = {key: values.narrow(0, start, length) for key, values in flat.items()}
                pieces.setdefault(name, []).append(piece)
                start += size
    return pieces, optimizer[0]["optimizer_state_dict"]["state"]


# --- installing ---


def allocate_moments(engine: DeepSpeedEngine, stage: int, states: States) -> None:
    """Has a new optimizer allocate its moments, by a step with gradient 0, and sets its step count as in `states`.
    The step may change weights by their decay; all weights are overwritten afterwards."""
    optimizer = engine.basic_optimizer
    updated = masters(engine, stage)
    groups, gradients = optimizer.param_groups, [master.grad for master in updated]
    optimizer.param_groups = [{**groups[0], "params": updated}]
    for master in updated:
        master.grad = torch.zeros_like(master)
    optimizer.step()
    optimizer.param_groups = groups
    for master, gradient in zip(updated, gradients, strict=True):
        master.grad = gradient
        if STEP in optimizer.state[master]:
            optimizer.state[master][STEP].fill_(float(states[0][STEP]))


def masters(engine: DeepSpeedEngine, stage: int) -> list[Tensor]:
    """Returns the tensors that the optimizer updates on this rank: fp32 weights, flattened except under stage 0."""
    if stage == 3:
        return engine.optimizer.fp32_partitioned_groups_flat
    return [master for group in engine.optimizer.param_groups for master in group["params"]]


def into_plain(engine: DeepSpeedEngine, trained: Trained, assemble: Assemble, moments: Moments) -> None:
    """Copies weights and moments into an engine under ZeRO 0. Its optimizer updates the parameters themselves, or the
    fp32 copies of bfloat16 ones."""
    for (name, parameter), master in zip(trained.items(), masters(engine, stage=0), strict=True):
        parameter.copy_(assemble(name, MASTER).view_as(parameter))
        master.copy_(assemble(name, MASTER).view_as(parameter))
        for key in moments:
            engine.optimizer.state[master][key].copy_(assemble(name, key).view_as(parameter))


def into_sharded_optimizer(engine: DeepSpeedEngine, trained: Trained, assemble: Assemble, moments: Moments) -> None:
    """Copies weights and moments into an engine under ZeRO 1 or 2."""
    optimizer = engine.optimizer
    for parameters, group in zip(optimizer.bit16_groups, optimizer.param_groups, strict=True):
        lazy_init_hp_params_optimizer_state(parameters, group["params"][0], optimizer.state)
    for name, parameter in trained.items():
        safe_set_full_fp32_param(parameter, assemble(name, MASTER))
        for key in moments:
            safe_set_full_optimizer_state(parameter, assemble(name, key), key)
    optimizer.update_lp_params()


def into_sharded_weights(engine: DeepSpeedEngine, trained: Trained, assemble: Assemble, moments: Moments) -> None:
    """Copies weights and moments into an engine under ZeRO 3. `local_part` is the memory of this rank's slice, in
    bfloat16 or fp32; the optimizer's fp32 weights and moments are padded slices."""
    for name, parameter in trained.items():
        local_part(parameter).copy_(take_shard(parameter, assemble(name, MASTER)))
        safe_set_local_fp32_param(parameter, padded(parameter, assemble(name, MASTER)))
        for key in moments:
            safe_set_local_optimizer_state(parameter, padded(parameter, assemble(name, key)), key)
    refresh_gathered(list(trained.values()))


def padded(parameter: nn.Parameter, full: Tensor) -> Tensor:
    """Returns this rank's slice of a full flat tensor [element], padded with 0 to the length of every rank's slice."""
    slice_ = take_shard(parameter, full)
    return nn.functional.pad(slice_, (0, vars(parameter)["ds_tensor"].numel() - slice_.numel()))
