"""Compiles the blocks of a network by torch.compile for the passes of the engine, and for no others.

A transformer repeats one block many times. Compiling the block in place of the whole network (regional compilation, as
in diffusers and accelerate) takes one compilation for all layers, and code around the blocks that cannot be traced
breaks no graph. Only how a block is called is replaced, as by `nn.Module.compile`: names in state dicts, hooks,
adapters and gradient checkpointing around a block are unchanged, and a copy of a module is not compiled.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes, is_in_torch_dispatch_mode
from torch.utils._pytree import tree_map_only

from mmrl.errors import UserError
from mmrl.kernels import toolchain

Backend = Literal["inductor", "aot_eager", "eager"]
Function = TypeVar("Function", bound=Callable[..., Any])
log = logging.getLogger(__name__)
VERSIONS = 64  # most compiled versions of a block: by kind of block, inputs that are absent, shapes of size 1

_apart: list[Callable[..., Any]] = []  # functions that compiled blocks call uncompiled
_recording = True  # False while autograd records a pass that needs no gradient, see `CompiledBlocks.call`


def records_gradients() -> bool:
    """Returns whether the current pass is for a gradient. Autograd records compiled passes in either case, see
    `CompiledBlocks.call`."""
    return _recording and torch.is_grad_enabled()


def apart(function: Function) -> Function:
    """Decorator: compiled blocks call this function of a module uncompiled, since what it does depends on values of
    tensors. torch's own decorator would import the compiler at once, which takes seconds."""
    _apart.append(function)
    return function


def check_compiler(backend: str) -> None:
    """Raises UserError where this machine lacks what a backend of engine.compile needs: for `inductor` a C++ compiler,
    and on GPUs Triton."""
    if backend != "inductor":
        return
    if not toolchain.compiler("cpu"):
        raise UserError(
            "engine.compile=inductor needs a C++ compiler, and neither $CXX nor g++ is one; install g++, or set "
            "engine.compile=none"
        )
    if torch.cuda.is_available() and importlib.util.find_spec("triton") is None:
        raise UserError("engine.compile=inductor needs Triton on GPUs; install triton, or set engine.compile=none")


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Returns the blocks of a network: the members of each `nn.ModuleList` in which all have submodules and one
    class. Of nested lists the outermost counts."""
    if isinstance(module, nn.ModuleList):
        members = list(module)
        if len({type(member) for member in members}) == 1 and all(any(True for _ in m.children()) for m in members):
            return members
    return [block for child in module.children() for block in repeated_blocks(child)]


class CompiledBlocks:
    """The compiled blocks of a network. Inside `running` they run compiled, elsewhere, such as in sampling,
    uncompiled."""

    def __init__(self, module: nn.Module, backend: Backend) -> None:
        """Compiles nothing yet: that happens at a block's first pass. Raises UserError for a network without blocks."""
        blocks = repeated_blocks(module)
        if not blocks:
            raise UserError(
                f"engine.compile={backend} compiles the repeated blocks of a network, and this one has none (no "
                "nn.ModuleList of blocks of one class); set engine.compile=none"
            )
        import torch._dynamo  # takes seconds, which jobs without it need not wait for

        torch._dynamo.config.recompile_limit = max(VERSIONS, torch._dynamo.config.recompile_limit)
        # It advises, at every block that reads a number from a tensor, a setting that costs more than it gains here.
        logging.getLogger("torch._dynamo.variables.tensor").setLevel(logging.ERROR)
        for function in _apart:  # they stay uncompiled
            module_globals = vars(sys.modules[function.__module__])
            module_globals[function.__name__] = torch.compiler.disable(function)
        self.active = False  # of all threads: backward passes, which recompute blocks, run in threads of their own
        for block in blocks:
            block._compiled_call_impl = CompiledCall(block, self, backend)
        counts = Counter(type(block).__name__ for block in blocks)
        log.info("engine.compile: %s", ", ".join(f"{count} x {name}" for name, count in counts.items()))

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context in which the blocks run compiled."""
        before, self.active = self.active, True
        try:
            yield
        finally:
            self.active = before

    def call(self, network: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        """Calls a network with its blocks compiled.

        Without gradients, too, autograd records the pass, and the output is detached: with and without gradients torch
        compiles different code, which rounds differently, and the first importance ratio would not be exactly 1.
        """
        global _recording
        with self.running():
            if torch.is_grad_enabled():
                return network(*args, **kwargs)
            before, _recording = _recording, False
            try:
                with torch.enable_grad():
                    output = network(*args, **kwargs)
            finally:
                _recording = before
        return tree_map_only(Tensor, Tensor.detach, output)


class CompiledCall:
    """Calls a block: compiled inside `CompiledBlocks.running`, elsewhere uncompiled."""

    def __init__(self, block: nn.Module, blocks: CompiledBlocks, backend: Backend) -> None:
        self.blocks, self.plain = blocks, block._call_impl
        # Lengths differ from batch to batch: with fixed shapes each would be compiled anew.
        self.compiled = torch.compile(block._call_impl, dynamic=True, backend=backend)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Calls the block: compiled inside `CompiledBlocks.running`, except with a key-value cache, else uncompiled."""
        # With a key-value cache compiled code would be valid for one layer only, and be compiled again for each.
        if not self.blocks.active or kwargs.get("past_key_values") is not None:
            return self.plain(*args, **kwargs)
        if not is_in_torch_dispatch_mode(include_infra_modes=False):
            return self.compiled(*args, **kwargs)
        # Operations are being counted, which torch does not do inside compiled code: so the block runs twice.
        with torch.autograd.graph.saved_tensors_hooks(_same, _same):  # gradient checkpointing must not see it
            self.plain(*args, **kwargs)
        with _disable_current_modes():
            return self.compiled(*args, **kwargs)


def _same(tensor: Tensor) -> Tensor:
    """Returns its argument; as a hook it saves tensors unchanged."""
    return tensor
