"""The part of mmrl inside vLLM's workers: it loads weights and records every copy, so that an engine can report the
checksum of each tensor that it received.

vLLM packs weights: queries, keys and values lie in one tensor, experts in another, processes have slices. Its own
loaders copy each tensor that was sent to its place. Here the copies are recorded: which elements went where. So the
checksum of a sent tensor can be computed from the engine's memory.

If an engine repacks a layer for its kernels (linear layers and experts on a CPU), its elements cannot be read back.
Then the checksum is computed when the tensor arrives in the layer, before it is repacked; the check of
log-probabilities (`rollout.generator.probes`) shows whether it was repacked correctly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from mmrl.generation.weight_sync.checksums import HELD, PACKED, WATCHES, Checksum, checksum
from mmrl.generation.weight_sync.nccl import BroadcastTimeout, Receiver

if TYPE_CHECKING:
    from vllm.config import VllmConfig

UNLOADED = "mmrl_unloaded"  # the load format of an engine that gets its weights after its start
COPY = torch.ops.aten.copy_.default
StridedView = tuple[int, tuple[int, ...]]  # offset of the first element, and strides, in elements
# For each part of a sent tensor: its view in that tensor, its shape, its view in the layer, and whether the layer keeps
# a repacked copy.
Layout = list[tuple[StridedView, tuple[int, ...], StridedView, bool]]


@dataclass
class ReceivedPart:
    """A part of a sent tensor, and where it was copied to. sent, landed: its checksums in the sent tensor, and right
    after the copy in the engine's precision. home: the same part in the memory with which the engine computes; None:
    repacked."""

    name: str
    view: StridedView  # in the sent tensor
    shape: torch.Size
    target: StridedView  # in the memory of `owner`
    owner: StorageWeakRef
    sent: Checksum
    landed: Checksum
    home: Tensor | None = None

    def settle(self, whole: Tensor) -> None:
        """Sets `home` to the part of `whole`, the tensor in whose memory this part landed, or to which that memory was
        copied."""
        first, strides = self.target
        self.home = torch.as_strided(whole, self.shape, strides, first)

    def now(self) -> Checksum:
        """Returns the checksum of the sent part if the engine still holds its values, else the checksum of the present
        values."""
        if self.home is None:
            return self.sent
        current = checksum(self.home, self.view)
        return self.sent if current == self.landed else current


class CopyWatch(TorchDispatchMode):
    """A mode of PyTorch in which copies of sent tensors into parameters are recorded."""

    def __init__(self, before: CopyWatch | None = None, *, filled: bool = False) -> None:
        """before: the watch of the previous weights. filled: whether the engine was filled with `ramp`, or with the
        weights that it gets now, when it was built."""
        super().__init__()
        self.filled = filled and before is None
        self.layouts: dict[str, Layout] = {} if before is None else before.layouts
        self.sources: dict[int, tuple[str, StorageWeakRef]] = {}  # name and memory of each sent tensor, by address
        self.parts: list[ReceivedPart] = []
        self.by_owner: dict[int, list[ReceivedPart]] = {}  # parts by the address of the memory in which they landed
        self.written: set[int] = set()  # addresses of the tensors that were written to
        # Addresses of parameters that the engine had repacked when it was built
        self.repacked: set[int] = set() if before is None else before.repacked

    def watched(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields names and tensors, each in memory of its own, and stores where they lie."""
        for name, value in weights:
            if not value.is_contiguous() or value.untyped_storage().nbytes() != value.nbytes:
                value = value.clone(memory_format=torch.contiguous_format)  # memory of its own
            self.sources[_address(value)] = name, StorageWeakRef(value.untyped_storage())
            yield name, value

    def __torch_dispatch__(
        self,
        function: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Runs an operation of PyTorch, and records it if it copies one tensor to another."""
        if function is not COPY or args[0].is_meta or args[1].is_meta:
            return function(*args, **(kwargs or {}))
        target, source = args[:2]
        self._before(target, source)
        result = function(*args, **(kwargs or {}))
        self._after(target, source)
        return result

    def _before(self, target: Tensor, source: Tensor) -> None:
        """Records a parameter that was repacked when the engine was built: its values differ from those it was filled
        with."""
        if self.filled and self._waiting(source) and _whole(target) and target.shape == source.shape:
            filled_or_sent = (_equal(target, source), _equal(target, ramp(target)))
            if not any(filled_or_sent):
                self.repacked.add(_address(target))

    def _after(self, target: Tensor, source: Tensor) -> None:
        """Records a copy: which tensor of the checkpoint landed in which parameter, or that a parameter was copied into
        another layout."""
        self.written.add(_address(target))
        name, memory = self.sources.get(_address(source), ("", None))
        if memory is not None and not memory.expired():
            if source.shape == target.shape:
                self._record_part(name, target, source)
        elif _address(source) != _address(target) and _alike(source, target):
            for part in self._waiting(source):
                part.settle(target)
            self.by_owner.pop(_address(source), None)

    def _record_part(self, name: str, target: Tensor, source: Tensor) -> None:
        """Records the checksums of a part of tensor `name` at its source and where it was copied to."""
        view = _view(source)
        part = ReceivedPart(
            name,
            view,
            target.shape,
            _view(target),
            StorageWeakRef(target.untyped_storage()),
            checksum(source.to(target.device), view),  # files are read on the CPU; a GPU computes this faster
            checksum(target, view),
        )
        self.parts.append(part)
        self.by_owner.setdefault(_address(target), []).append(part)

    def _waiting(self, memory: Tensor) -> list[ReceivedPart]:
        """Returns the parts that landed in the memory of a tensor and have no `home` yet."""
        return [part for part in self.by_owner.get(_address(memory), []) if not part.owner.expired()]

    def finish(self, model: nn.Module) -> None:
        """Sets `home` of the parts that stay where they landed. A part whose values then differ was repacked and gets
        None."""
        for tensor in [*model.parameters(), *model.buffers()]:
            for part in self._waiting(tensor):
                part.settle(tensor)
        for part in self.parts:
            if part.home is not None and checksum(part.home, part.view) != part.landed:
                part.home = None
        self.by_owner.clear()
        self.sources.clear()
        self.new_layouts = {name: self._layout(name) for name in {part.name for part in self.parts}}
        self.layouts = self.layouts or self.new_layouts

    def _layout(self, name: str) -> Layout:
        """Returns where the parts of a sent tensor lie."""
        parts = [part for part in self.parts if part.name == name]
        return sorted((part.view, tuple(part.shape), part.target, part.home is None) for part in parts)

    def blank(self, model: nn.Module) -> list[str]:
        """Returns the names of the parameters to which nothing was written."""
        return [
            name
            for name, parameter in model.named_parameters()
            if parameter.numel() and _address(parameter) not in self.written
        ]

    def misplaced(self) -> list[str]:
        """Returns the names of the sent tensors with a part that is not repacked although it was when the engine was
        built, and of tensors with another layout than at the first transfer."""
        unpacked = {x.name for x in self.parts if x.home is not None and _address(x.home) in self.repacked}
        return sorted(
            unpacked | {name for name, layout in self.new_layouts.items() if self.layouts.get(name) != layout}
        )

    def checksums(self) -> dict[str, Checksum]:
        """Returns the checksum of each sent tensor in the engine, by name."""
        checksums: dict[str, Checksum] = {}
        for part in self.parts:
            now = part.now()
            local = Checksum(now.value, now.count, PACKED if part.home is None else HELD)
            checksums[part.name] = checksums[part.name] + local if part.name in checksums else local
        return checksums


class Arrival:
    """Methods that vLLM adds to its workers (worker_extension_cls), to be called through collective_rpc."""

    model_runner: Any
    vllm_config: VllmConfig
    rank: int  # of this worker in its engine
    watch: CopyWatch | None = None
    receiver: Receiver | None = None
    untouched = True  # whether the engine still has the values of `ramp`, with which it was filled

    def receive(self, weights: Iterable[tuple[str, Tensor]], filled: bool = True) -> None:
        """Replaces all weights. weights: tensors by the names in the model's checkpoint, in its shapes. filled: see
        `CopyWatch`, which records where they land unless checksums are switched off."""
        if not torch.cuda.is_available():
            repack_experts(self.model_runner.get_model())
        additional: Any = self.vllm_config.additional_config
        if not additional[WATCHES]:
            with torch.no_grad():
                self.model_runner.reload_weights(weights_iterator=weights)
            return
        watch = CopyWatch(self.watch, filled=filled)
        with watch, torch.no_grad():
            self.model_runner.reload_weights(weights_iterator=watch.watched(weights))
        watch.finish(self.model_runner.get_model())
        self.watch = watch

    def receive_folder(self, folder: str) -> None:
        """Receives weights from the safetensors files of a folder."""
        self.receive(read_folder(Path(folder)), filled=str(self.vllm_config.model_config.model) == folder)

    def standing(self) -> dict[str, Any]:
        """Returns the state of this worker, see `Receiver.standing`."""
        return self._receiver().standing()

    def receive_broadcast(self, rendezvous: dict[str, Any], first: int, base: str) -> None:
        """Receives weights that the trainer broadcasts. first: the rank of this engine's first worker in the group.
        base: the name of these weights. Raises RuntimeError or BroadcastTimeout like `Receiver.weights`."""
        problems: list[Exception] = []
        receiver, before = self._receiver(), self.watch
        receiver.join(rendezvous, first + self.rank)
        receiver.base = None
        weights = until_error(receiver.weights(base), problems)
        # at the first transfer only, and if the engine was filled with `ramp`
        filled, self.untouched = self.untouched and self.vllm_config.load_config.load_format == UNLOADED, False
        try:
            self.receive(weights, filled=filled)
            for _ in weights:  # also those that the engine did not take, since the other members wait for this one
                pass
            if problems:
                raise problems[0]
            receiver.base = base
        finally:
            if receiver.base is None:  # the others notice that the connection is closed
                self.watch = before
                receiver.leave()

    def _receiver(self) -> Receiver:
        """Returns the receiver, which is created at the first call, since vLLM does not call the constructor of an
        extension."""
        self.receiver = self.receiver or Receiver()
        return self.receiver

    def arrived(self, adapter: str | None = None) -> dict[str, Any]:
        """Returns the report of this worker on its weights: "tensors", the value, count and state of each checksum by
        the name of the sent tensor; "blank" and "misplaced", see `CopyWatch`. adapter: the folder of the LoRA that is
        in use."""
        assert self.watch is not None
        tensors = self.watch.checksums() | ({} if adapter is None else adapters(self.model_runner, Path(adapter)))
        return {
            "tensors": {name: [x.value, x.count, x.state] for name, x in tensors.items()},
            "blank": self.watch.blank(self.model_runner.get_model()),
            "misplaced": self.watch.misplaced(),
        }


def until_error(weights: Iterator[tuple[str, Tensor]], problems: list[Exception]) -> Iterator[tuple[str, Tensor]]:
    """Yields weights; if the next ones cannot be received, ends and appends the error to `problems`. An exception
    inside of vLLM's loader would leave some of its layers on the meta device."""
    try:
        yield from weights
    except (RuntimeError, BroadcastTimeout) as error:
        problems.append(error)


def read_folder(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields names and tensors of the safetensors files in a folder."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (it is not a mapping)
                yield name, file.get_tensor(name)


def repack_experts(model: nn.Module) -> None:
    """Makes vLLM repack the experts' weights for its CPU kernel after the next load. It does so only at the first load
    (UnquantizedFusedMoEMethod._setup_kernel), and would later copy unpacked weights over packed ones. On a GPU they are
    not packed."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    for module in model.modules():
        if isinstance(module, RoutedExperts):
            module.quant_method.moe_kernel = None


def ramp(like: Tensor) -> Tensor:
    """Returns values for a parameter without weights, in the shape and dtype of `like`. Repacking changes their order,
    by which it is noticed."""
    # -125 to 125, divided by a power of 2: bfloat16, too, represents these values exactly
    flat = torch.arange(like.numel(), device=like.device) % 251 - 125
    return (flat / 4096).to(like.dtype).view(like.shape)


def adapters(runner: Any, folder: Path) -> dict[str, Checksum]:
    """Returns checksums of the LoRA in `folder`, by name, computed from the buffers that the engine uses."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    manager = runner.lora_manager._adapter_manager
    mapper = manager.model.hf_to_vllm_mapper
    packed_layers = {
        part: (whole, i) for whole, parts in manager.packed_modules.items() for i, part in enumerate(parts)
    }
    checksums = {}
    for name, value in read_folder(folder):
        module, first = parse_fine_tuned_lora_name(name, mapper and mapper.get_rename_mapper())
        layer, index = packed_layers.get(module, (module, 0))
        slot = next((i for i, number in enumerate(manager.lora_index_to_id) if number is not None), None)
        if layer in manager.modules and slot is not None:
            module_layer = manager.modules[layer]
            # a matrix in vLLM's buffer [adapter, 1, output, input], which may be padded beyond the LoRA's sizes
            stacked = (module_layer.lora_a_stacked if first else module_layer.lora_b_stacked)[index][slot, 0]
            checksums[name] = checksum(stacked[: value.shape[0], : value.shape[1]])
    return checksums


def _address(tensor: Tensor) -> int:
    """Returns the address of a tensor's memory."""
    return tensor.untyped_storage().data_ptr()


def _view(tensor: Tensor) -> StridedView:
    """Returns the offset of the first element and the strides of a tensor in its memory."""
    return int(tensor.storage_offset()), tuple(tensor.stride())


def _whole(tensor: Tensor) -> bool:
    """Returns whether a tensor fills all of its memory."""
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == tensor.nbytes


def _alike(source: Tensor, target: Tensor) -> bool:
    """Returns whether a copy of `source`, all of its memory, to `target` keeps the offset of every element."""
    return _whole(source) and target.storage_offset() == 0 and source.stride() == target.stride()


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)
