"""A pretend GPU: tensors that say they lie on another device, compute on the CPU, and refuse to be mixed with the CPU's
as CUDA refuses it. What crosses between host and device, and what would wait for the device, is counted by its place.

The device's type is `lazy`: of the types that torch knows and that have no backend here, the one for which autograd
stays in the calling thread.
"""

import sys
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("lazy", 0)
aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}
READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default, aten.masked_select.default}
INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
INDEXED |= {aten._unsafe_index.Tensor}


class MixedDevices(RuntimeError):
    """CUDA would refuse it too."""


class Ledger:
    """What goes "to the device" and "from the device" and what makes the host "wait" for it: how often, how many bytes,
    and from which lines of mmrl."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.times, self.bytes = Counter(), Counter()
        self.places: dict[str, Counter] = {}

    def note(self, kind: str, tensor: torch.Tensor) -> None:
        self.times[kind] += 1
        self.bytes[kind] += tensor.numel() * tensor.element_size()
        self.places.setdefault(kind, Counter())[_place()] += 1


LEDGER = Ledger()


def _place() -> str:
    """The innermost line of mmrl, its tasks or simulators."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if "site-packages" not in name and any(part in name for part in ("/mmrl/", "/sims/", "/tasks/")):
            return f"{name.rsplit('/mmrl/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


class Pretended(torch.Tensor):
    """A tensor on the pretend device; `inner` holds its numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
            requires_grad=False,
        )

    def __init__(self, inner):
        self.inner = inner

    def __repr__(self):
        return f"Pretended({self.inner!r})"

    def tolist(self):
        LEDGER.note("wait", self)
        return self.inner.tolist()

    def numpy(self, *_, **__):
        raise MixedDevices("can't convert a tensor of the pretend device to numpy")

    @classmethod
    def __torch_dispatch__(cls, function, types_, arguments=(), options=None):
        return _dispatched(function, arguments, options or {})


def _plain(value):
    return value.inner if isinstance(value, Pretended) else value


def _wrapped(value):
    return Pretended(value) if isinstance(value, torch.Tensor) and not isinstance(value, Pretended) else value


def _there(device) -> bool:
    return device is not None and torch.device(device).type == DEVICE.type


def _check(function, arguments, tensors) -> None:
    """As CUDA: tensors without a dimension, and the CPU's indices into the device's, may come from elsewhere."""
    others = [t for t in tensors if not isinstance(t, Pretended)]
    if function in INDEXED:
        indices = [i for i in arguments[1] if i is not None]
        if not isinstance(arguments[0], Pretended) and any(isinstance(i, Pretended) for i in indices):
            raise MixedDevices(f"{function}: indices on the device into a tensor of the CPU")
        for index in indices:
            if not isinstance(index, Pretended):
                LEDGER.note("to the device", index)
            elif index.dtype == torch.bool:
                LEDGER.note("wait", index)
        others = [t for t in (arguments[0], *arguments[2:3]) if type(t) is not Pretended]
        others = [t for t in others if isinstance(t, torch.Tensor)]
    if wrong := [tuple(t.shape) for t in others if t.dim() > 0]:
        raise MixedDevices(f"{function}: expected all tensors on one device; of the CPU are {wrong}")


def _dispatched(function, arguments, options):
    tensors = [t for t in tree_leaves((arguments, options)) if isinstance(t, torch.Tensor)]
    mine = any(isinstance(t, Pretended) for t in tensors)
    device = options.get("device")
    target = mine if device is None else _there(device)
    if _there(device):
        options = {**options, "device": torch.device("cpu")}
    if mine and function not in COPIES:
        _check(function, arguments, tensors)
    if function is aten._to_copy.default and isinstance(arguments[0], Pretended) != target:
        LEDGER.note("to the device" if target else "from the device", arguments[0])
    if function is aten.copy_.default:
        to, given = (isinstance(t, Pretended) for t in arguments[:2])
        if to != given and arguments[1].dim() > 0:
            LEDGER.note("to the device" if to else "from the device", arguments[1])
        function(*tree_map(_plain, arguments), **tree_map(_plain, options))
        return arguments[0]
    if mine and function in READS:
        LEDGER.note("wait", next(t for t in tensors if isinstance(t, Pretended)))
    found = function(*tree_map(_plain, arguments), **tree_map(_plain, options))
    if not target:
        return found
    found = tree_map(_wrapped, found)
    return return_and_correct_aliasing(function, arguments, options, found) if mine else found


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types_, arguments=(), options=None):
        return _dispatched(function, arguments, options or {})


def _module() -> types.ModuleType:
    """`torch.lazy` as torch.utils.checkpoint and autocast ask for a device's module."""
    made = types.ModuleType("torch.lazy")
    made._initialized, made._is_in_bad_fork = True, lambda: False
    made.device = lambda number: nullcontext()
    made.get_rng_state, made.set_rng_state = lambda *_: torch.get_rng_state(), lambda *_: None
    made.is_available, made.current_device = lambda: True, lambda: 0
    made.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    return made


@contextmanager
def pretending(monkeypatch) -> Iterator[Ledger]:
    """Inside it `DEVICE` is there, and what crosses is counted from 0."""
    LEDGER.clear()
    asked, real, generator = torch.is_autocast_enabled, torch.tensor, torch.Generator

    def tensor(data, *arguments, device=None, **options):
        def read(value):
            if isinstance(value, Pretended):
                LEDGER.note("wait", value)
                return value.inner.tolist()
            return [read(item) for item in value] if isinstance(value, (list, tuple)) else value

        made = real(read(data), *arguments, **options)
        if not _there(device):
            return made if device is None else made.to(device)
        LEDGER.note("to the device", made)
        return Pretended(made)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "lazy", _module(), raising=False)
        patch.setattr(torch, "tensor", tensor)
        patch.setattr(torch, "Generator", lambda device="cpu": generator("cpu"))
        patch.setattr(torch, "is_autocast_enabled", lambda *kind: False if kind == (DEVICE.type,) else asked(*kind))
        lifting = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            with torch.autograd.set_multithreading_enabled(False), _Mode():
                yield LEDGER
        finally:
            torch._C._set_only_lift_cpu_tensors(lifting)


def moved(module: torch.nn.Module) -> torch.nn.Module:
    """The module with its parameters and buffers on the pretend device; those that are shared stay so."""
    known: dict[int, torch.nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and not isinstance(parameter, Pretended):
                own = known.setdefault(
                    id(parameter), torch.nn.Parameter(Pretended(parameter.detach()), parameter.requires_grad)
                )
                part._parameters[name] = own
        for name, buffer in part._buffers.items():
            if buffer is not None and not isinstance(buffer, Pretended):
                part._buffers[name] = Pretended(buffer)
    return module
