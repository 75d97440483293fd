"""A checkpoint of DeepSpeed's loaded by another number of ranks, or another ZeRO stage.

DeepSpeed's own way (its universal checkpoint) is not used: it can not go from stage 2 to 3, gives every parameter group
the options of the first one when it loads stage 3, and opens pickles. Here each tensor is put together from the pieces
that the ranks wrote, which stay on the disk until then, and this rank keeps its part; so the largest parameter decides
the memory that is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.engine.ema import gather_again, take

MASTER = "fp32"  # the weights that the optimizer steps; beside them its moments
STEP = "step"  # how many it has taken, where it counts them
Moments = tuple[str, ...]  # what the optimizer keeps of a parameter, see `settings.Optim`
Piece = dict[str, Tensor]  # of one parameter: weights and moments, flat
Whole = Callable[[str, str], Tensor]  # of a parameter's name, and of what of it: the whole tensor, flat
Count = dict[str, Tensor]  # STEP, or nothing


@torch.no_grad()
def load(engine: Any, folder: Path, zero_stage: int, ranks: int, now: int, moments: Moments) -> dict[str, Any]:
    """Weights and optimizer from the files in `folder`, which `ranks` ranks wrote under `zero_stage`, into DeepSpeed's
    engine, which runs under stage `now`; returns the state that was saved with them. moments: of the optimizer, the
    same before and now."""
    model = [read(path) for path in sorted(folder.glob("*model_states.pt"), key=rank_of)]
    optimizer = [read(path)["optimizer_state_dict"] for path in sorted(folder.glob("*optim_states.pt"), key=rank_of)]
    assert len(optimizer) == (ranks if zero_stage > 0 else 0)
    by_name = dict(engine.module.named_parameters())
    if zero_stage == 0:
        pieces, count = unsharded(model[0], trained_names(by_name), moments)
    elif zero_stage == 3:
        pieces, count = sharded_weights(optimizer, model[0]["param_shapes"], moments)
    else:
        pieces, count = sharded_optimizer(optimizer, moments)

    def whole(name: str, key: str) -> Tensor:
        return torch.cat([piece[key] for piece in pieces[name]])

    install = {0: into_plain, 3: into_sharded_weights}.get(now, into_sharded_optimizer)
    install(engine.optimizer, by_name, whole, moments, count)
    buffers = dict(engine.module.named_buffers())
    for name in buffers.keys() & model[0]["module"].keys():
        buffers[name].copy_(model[0]["module"][name])
    engine.global_steps, engine.skipped_steps = model[0]["global_steps"], model[0]["skipped_steps"]
    return model[0]


def read(path: Path) -> dict[str, Any]:
    """Tensors are mapped: they are read when they are used."""
    return torch.load(str(path), map_location="cpu", mmap=True)


def rank_of(path: Path) -> int:
    words = path.name.split("_")
    return int(words[words.index("pp") + 2]) if "pp" in words else 0


def trained_names(by_name: dict[str, nn.Parameter]) -> list[str]:
    """Names of the parameters in the order in which an optimizer counts them."""
    names = {p: name for name, p in by_name.items()}
    matrices = {p: len(vars(p).get("ds_shape", p.shape)) >= 2 for _, p in trained(by_name)}  # as `Engine` groups them
    return [names[p] for p in matrices if matrices[p]] + [names[p] for p in matrices if not matrices[p]]


# --- what was written ---


def counted(states: dict[int, dict[str, Any]]) -> Count:
    """How many steps an optimizer has taken, of the states that it keeps: none where it keeps nothing."""
    return {STEP: torch.tensor(float(states[0][STEP]))} if STEP in states.get(0, {}) else {}


def unsharded(model: dict[str, Any], names: list[str], moments: Moments) -> tuple[dict[str, list[Piece]], Count]:
    """Of ZeRO 0: one file holds everything."""
    state = model["optimizer"]["state"]
    pieces = {
        name: [
            {MASTER: model["module"][name].flatten(), **{key: state[place][key].flatten() for key in moments}},
        ]
        for place, name in enumerate(names)
    }
    return pieces, counted(state)


def sharded_optimizer(optimizer: list[dict[str, Any]], moments: Moments) -> tuple[dict[str, list[Piece]], Count]:
    """Of ZeRO 1 and 2: all parameters of a group lie one behind the other, and each rank has a stretch of that."""
    pieces: dict[str, list[Piece]] = {}
    for rank in optimizer:
        states, masters = rank["base_optimizer_state"]["state"], rank["single_partition_of_fp32_groups"]
        for group, addresses in enumerate(rank["param_slice_mappings"]):
            flat = {MASTER: masters[group], **{key: states[group][key] for key in moments}}
            for name, address in addresses.items():
                piece = {key: values.narrow(0, address.start, address.numel) for key, values in flat.items()}
                pieces.setdefault(name, []).append(piece)
    return pieces, counted(optimizer[0]["base_optimizer_state"]["state"])


def sharded_weights(
    optimizer: list[dict[str, Any]], shapes: list[dict[str, torch.Size]], moments: Moments
) -> tuple[dict[str, list[Piece]], Count]:
    """Of ZeRO 3: each rank has a slice of each parameter, all of one length; the last ones are padded."""
    pieces: dict[str, list[Piece]] = {}
    for rank, state in enumerate(optimizer):
        for group, group_shapes in enumerate(shapes):
            kept = state["optimizer_state_dict"]["state"]
            flat = {MASTER: state["fp32_flat_groups"][group], **{key: kept[group][key] for key in moments}}
            start = 0
            for name, shape in group_shapes.items():
                size = -(-shape.numel() // len(optimizer))
                own = max(0, min(size, shape.numel() - rank * size))
                piece = {key: values.narrow(0, start, own) for key, values in flat.items()}
                pieces.setdefault(name, []).append(piece)
                start += size
    return pieces, counted(optimizer[0]["optimizer_state_dict"]["state"])


# --- where it goes ---


def into_plain(optimizer: Any, by_name: dict[str, nn.Parameter], whole: Whole, moments: Moments, count: Count) -> None:
    for name, parameter in trained(by_name):
        parameter.data.copy_(whole(name, MASTER).view_as(parameter))
        kept = {key: whole(name, key).view_as(parameter).to(parameter.device, copy=True) for key in moments}
        optimizer.state[parameter] = copied(count) | kept


def into_sharded_optimizer(
    optimizer: Any, by_name: dict[str, nn.Parameter], whole: Whole, moments: Moments, count: Count
) -> None:
    for group, master in enumerate(optimizer.single_partition_of_fp32_groups):
        flat = {MASTER: master.data, **{key: torch.zeros_like(master.data) for key in moments}}
        for name, address in optimizer._param_slice_mappings[group].items():
            mine: Any = vars(by_name[name])["_hp_mapping"].lp_fragment_address
            for key, values in flat.items():
                part = whole(name, key).narrow(0, mine.start, mine.numel)
                values.narrow(0, address.start, address.numel).copy_(part)
        optimizer.optimizer.state[master] = copied(count) | {key: flat[key] for key in moments}
    optimizer.update_lp_params()


def into_sharded_weights(
    optimizer: Any, by_name: dict[str, nn.Parameter], whole: Whole, moments: Moments, count: Count
) -> None:
    names = {p: name for name, p in by_name.items()}
    for group, master in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        flat = {MASTER: master.data, **{key: torch.zeros_like(master.data) for key in moments}}
        start = 0
        for parameter in group:
            for key, values in flat.items():
                part = take(parameter, whole(names[parameter], key))
                values.narrow(0, start, part.numel()).copy_(part)
            slice_ = take(parameter, whole(names[parameter], MASTER))
            parameter.ds_tensor.narrow(0, 0, slice_.numel()).copy_(slice_)
            start += parameter.ds_tensor.numel()
        optimizer.optimizer.state[master] = copied(count) | {key: flat[key] for key in moments}
    gather_again([p for _, p in trained(by_name)])


def copied(count: Count) -> Count:
    """For one parameter: torch counts in place."""
    return {key: value.clone() for key, value in count.items()}


def trained(by_name: dict[str, nn.Parameter]) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in by_name.items() if p.requires_grad)
