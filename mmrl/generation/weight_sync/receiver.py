"""The part inside vLLM's workers: they load weights under watch, so that an engine can report what it has of each.

vLLM packs weights: queries, keys and values lie in one tensor, experts in another, processes have slices. Its own
loaders know where everything goes. They copy, and here each copy from a tensor that was sent into one of the engine is
noted: which elements went where. So checksums of the tensors as they were sent can be had from the engine's memory.

Where an engine repacks a layer for its kernels (linear layers and experts on a CPU) there is nothing left to read.
There the checksum is taken when the tensor arrives in the layer, before it is repacked; that it is repacked rightly is
for the probe to show.
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

UNLOADED = "mmrl_unloaded"  # the load format of an engine whose weights come after its start
COPY = torch.ops.aten.copy_.default
StridedView = tuple[int, tuple[int, ...]]  # the first element, and strides
# The parts of a tensor: view of it, shape, view of the layer, and whether the layer keeps a repacked copy
Layout = list[tuple[StridedView, tuple[int, ...], StridedView, bool]]


@dataclass
class ReceivedPart:
    """A part of a tensor that was sent, and where it went."""

    name: str
    view: StridedView  # in the tensor that was sent
    shape: torch.Size
    target: StridedView  # in the memory of `owner`
    owner: StorageWeakRef
    sent: Checksum
    landed: Checksum  # right after the copy, in the precision of the engine
    home: Tensor | None = None  # the same part where the engine computes with it

    def settle(self, whole: Tensor) -> None:
        """`whole` is, or took over, the memory in which this landed."""
        first, strides = self.target
        self.home = torch.as_strided(whole, self.shape, strides, first)

    def now(self) -> Checksum:
        """The checksum that was sent if the engine still has that part, else that of what it has."""
        if self.home is None:
            return self.sent
        current = checksum(self.home, self.view)
        return self.sent if current == self.landed else current


class CopyWatch(TorchDispatchMode):
    """Mode in which copies are noted."""

    def __init__(self, before: CopyWatch | None = None, *, filled: bool = False) -> None:
        """before: that of the last time. filled: the engine was filled with `ramp`, or with what it gets now, when it
        was made."""
        super().__init__()
        self.filled = filled and before is None
        self.layouts: dict[str, Layout] = {} if before is None else before.layouts
        self.sources: dict[int, tuple[str, StorageWeakRef]] = {}  # by address
        self.parts: list[ReceivedPart] = []
        self.by_owner: dict[int, list[ReceivedPart]] = {}
        self.written: set[int] = set()  # addresses
        # Addresses of parameters that did not lie as they came when the engine was made
        self.repacked: set[int] = set() if before is None else before.repacked

    def watched(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
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
        if function is not COPY or args[0].is_meta or args[1].is_meta:
            return function(*args, **(kwargs or {}))
        target, source = args[:2]
        self._before(target, source)
        result = function(*args, **(kwargs or {}))
        self._after(target, source)
        return result

    def _before(self, target: Tensor, source: Tensor) -> None:
        """Notes a layer that was packed when it was made: it has other bytes than it was filled with."""
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
            checksum(source.to(target.device), view),  # on a GPU in no time, where files were read on the CPU
            checksum(target, view),
        )
        self.parts.append(part)
        self.by_owner.setdefault(_address(target), []).append(part)

    def _waiting(self, memory: Tensor) -> list[ReceivedPart]:
        return [part for part in self.by_owner.get(_address(memory), []) if not part.owner.expired()]

    def finish(self, model: nn.Module) -> None:
        """Settles parts that landed where they stay; parts whose layout differs from how they landed are packed."""
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
        parts = [part for part in self.parts if part.name == name]
        return sorted((part.view, tuple(part.shape), part.target, part.home is None) for part in parts)

    def blank(self, model: nn.Module) -> list[str]:
        """Names of parameters that nothing was written into."""
        return [
            name
            for name, parameter in model.named_parameters()
            if parameter.numel() and _address(parameter) not in self.written
        ]

    def misplaced(self) -> list[str]:
        """Names of tensors of which a part lies as it came where the engine had packed it, or that lie in another
        layout than the first time."""
        unpacked = {x.name for x in self.parts if x.home is not None and _address(x.home) in self.repacked}
        return sorted(
            unpacked | {name for name, layout in self.new_layouts.items() if self.layouts.get(name) != layout}
        )

    def checksums(self) -> dict[str, Checksum]:
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
    untouched = True  # no broadcast has begun to replace the numbers that the engine was filled with

    def receive(self, weights: Iterable[tuple[str, Tensor]], filled: bool = True) -> None:
        """Replaces all weights; names and layout are those of the model's checkpoint. filled: the engine was filled
        with `ramp`, or with these weights, when it was made."""
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
        """Receives weights from files in safetensors' format."""
        self.receive(read_folder(Path(folder)), filled=str(self.vllm_config.model_config.model) == folder)

    def standing(self) -> dict[str, Any]:
        """See `Receiver.standing`."""
        return self._receiver().standing()

    def receive_broadcast(self, rendezvous: dict[str, Any], first: int, base: str) -> None:
        """Receives weights that the trainer broadcasts. first: the rank in the group of this engine's first worker.
        base: the name of these weights. Raises what `Receiver.weights` does."""
        problems: list[Exception] = []
        receiver, before = self._receiver(), self.watch
        receiver.join(rendezvous, first + self.rank)
        receiver.base = None
        coming = whole(receiver.weights(base), problems)
        filled, self.untouched = self.untouched and self.vllm_config.load_config.load_format == UNLOADED, False
        try:
            self.receive(coming, filled=filled)
            for _ in coming:  # what the engine did not ask for: the other members wait for this one
                pass
            if problems:
                raise problems[0]
            receiver.base = base
        finally:
            if receiver.base is None:  # the connection tells the others
                self.watch = before
                receiver.leave()

    def _receiver(self) -> Receiver:
        """The receiver, made at first use: vLLM does not call the constructor of an extension."""
        self.receiver = self.receiver or Receiver()
        return self.receiver

    def arrived(self, adapter: str | None = None) -> dict[str, Any]:
        """The report of this worker. tensors: value, count and state of each checksum, by the name it came with. blank:
        parameters that got nothing. misplaced: tensors whose layout is not the one that the engine's kernels read.
        adapter: the folder of the LoRA that is in use."""
        assert self.watch is not None
        tensors = self.watch.checksums() | ({} if adapter is None else adapters(self.model_runner, Path(adapter)))
        return {
            "tensors": {name: [x.value, x.count, x.state] for name, x in tensors.items()},
            "blank": self.watch.blank(self.model_runner.get_model()),
            "misplaced": self.watch.misplaced(),
        }


def whole(weights: Iterator[tuple[str, Tensor]], problems: list[Exception]) -> Iterator[tuple[str, Tensor]]:
    """Yields weights, ends where the rest does not come, and notes why. vLLM would keep a half of its layers on the
    meta device if an exception went through its loader; the next weights find the engine as it should be."""
    try:
        yield from weights
    except (RuntimeError, BroadcastTimeout) as error:
        problems.append(error)


def read_folder(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (it is not a mapping)
                yield name, file.get_tensor(name)


def repack_experts(model: nn.Module) -> None:
    """Lets vLLM pack the experts' weights for its CPU kernel again. After a reload it would copy them unpacked over
    packed ones (UnquantizedFusedMoEMethod._setup_kernel: experts process weights in the first call alone); for a GPU
    they are not packed."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    for module in model.modules():
        if isinstance(module, RoutedExperts):
            module.quant_method.moe_kernel = None


def ramp(like: Tensor) -> Tensor:
    """A deterministic fill pattern that any packing changes, for an engine without weights."""
    flat = torch.arange(like.numel(), device=like.device) % 251 - 125
    return (flat / 4096).to(like.dtype).view(like.shape)


def adapters(runner: Any, folder: Path) -> dict[str, Checksum]:
    """Checksums of the LoRA that was read from `folder`, in the buffers that the engine computes with."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    manager = runner.lora_manager._adapter_manager
    mapper = manager.model.hf_to_vllm_mapper
    where = {part: (whole, i) for whole, parts in manager.packed_modules.items() for i, part in enumerate(parts)}
    checksums = {}
    for name, value in read_folder(folder):
        module, first = parse_fine_tuned_lora_name(name, mapper and mapper.get_rename_mapper())
        layer, index = where.get(module, (module, 0))
        slot = next((i for i, number in enumerate(manager.lora_index_to_id) if number is not None), None)
        if layer in manager.modules and slot is not None:
            module_layer = manager.modules[layer]
            stacked = (module_layer.lora_a_stacked if first else module_layer.lora_b_stacked)[index][slot, 0]
            checksums[name] = checksum(stacked[: value.shape[0], : value.shape[1]])
    return checksums


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _view(tensor: Tensor) -> StridedView:
    """The first element and the strides of a tensor in its memory."""
    return int(tensor.storage_offset()), tuple(tensor.stride())


def _whole(tensor: Tensor) -> bool:
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == tensor.nbytes


def _alike(source: Tensor, target: Tensor) -> bool:
    """Returns whether a copy of all of one to the other keeps every element's offset."""
    return _whole(source) and target.storage_offset() == 0 and source.stride() == target.stride()


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)
