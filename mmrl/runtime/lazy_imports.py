"""Names that libraries import at once and that a job here seldom or never uses: they are imported when first used.

For one decoding with a smaller model transformers imports scikit-learn, for masks that are compiled torch's compiler,
for weights split over ranks `torch.distributed.tensor`; diffusers imports peft, with LoRA or without. That is half of
the time until a first step. `defer_imports` lets the import statements of those modules, and of no others, give
stand-ins: whoever calls one, asks it for an attribute or derives from it gets the library's own, imported then. So
nothing is missing, nothing is replaced, and `import sklearn` elsewhere is what it always was. A module that was
imported before, and a version of a library that imports other names, are left as they are.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

ANY: Sequence[str] = ("*",)
SHARDED = {
    "transformers.distributed.sharding_utils": ANY,
    "transformers.distributed.tensor_parallel": ANY,
    "torch.distributed.tensor": ("DTensor",),
    "torch.distributed._composable.fsdp": ("fully_shard",),
    "torch.distributed.fsdp": ("CPUOffloadPolicy", "MixedPrecisionPolicy"),
}
ADAPTERS = {
    "peft": ("PeftModel",),
    "peft.helpers": ("disable_input_dtype_casting",),
    "peft.tuners.tuners_utils": ("BaseTunerLayer",),
}
MATCHING = {"scipy.optimize": ("linear_sum_assignment",)}
SCHEDULERS = (  # those that import scipy.stats, for noise levels of a kind
    *("deis_multistep", "dpmsolver_multistep", "dpmsolver_multistep_inverse", "dpmsolver_sde", "dpmsolver_singlestep"),
    *("euler_discrete", "flow_match_euler_discrete", "flow_match_lcm", "heun_discrete", "k_dpm_2_ancestral_discrete"),
    *("k_dpm_2_discrete", "sasolver", "unipc_multistep"),
)
# By the module whose import statements are meant: modules, and their names, that they give stand-ins of.
DEFERRED: Mapping[str, Mapping[str, Sequence[str]]] = {
    "transformers.generation.candidate_generator": {"sklearn.metrics": ("roc_curve",)},
    "transformers.masking_utils": {
        "torch._dynamo._trace_wrapped_higher_order_op": ("TransformGetItemToIndex",),
    },
    **{
        f"transformers.loss.loss_{name}": MATCHING
        for name in ("deformable_detr", "for_object_detection", "grounding_dino", "lw_detr", "rf_detr", "rt_detr")
    },
    "torchvision.ops.roi_align": {"torch._dynamo.utils": ("is_compile_supported",)},
    "transformers.core_model_loading": SHARDED,
    "transformers.modeling_utils": SHARDED,
    "transformers.distributed.fsdp": SHARDED,
    "transformers.distributed.mixin": SHARDED,
    "transformers.distributed.utils": SHARDED,
    "diffusers.hooks.layerwise_casting": ADAPTERS,
    "diffusers.loaders.lora_base": ADAPTERS,
    "diffusers.utils.peft_utils": ADAPTERS,
    "diffusers.pipelines.pipeline_loading_utils": ADAPTERS,
    "diffusers.schedulers.scheduling_lms_discrete": {"scipy": ("integrate",), "scipy.stats": ()},
    **{f"diffusers.schedulers.scheduling_{name}": {"scipy.stats": ()} for name in SCHEDULERS},
}


def defer_imports() -> None:
    """From here on, in this process; again it does nothing."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())


COMPILER = "torch._dynamo"
ASK_FOR_COMPILER = ("torch._compile", "torch.compiler", "torch.optim.optimizer", "diffusers.utils.torch_utils")


class Deferred:
    """Stands for `name` of the module `source`."""

    def __init__(self, source: str, name: str) -> None:
        self._source, self._name = source, name

    def _own(self) -> Any:
        return getattr(importlib.import_module(self._source), self._name)

    def __call__(self, *words: Any, **named: Any) -> Any:
        return self._own()(*words, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own(), name)

    def __instancecheck__(self, thing: Any) -> bool:
        # Of a class that nobody has imported there are no instances.
        return self._source in sys.modules and isinstance(thing, self._own())

    def __subclasscheck__(self, kind: type) -> bool:
        return self._source in sys.modules and issubclass(kind, self._own())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._own(),)

    def __or__(self, other: Any) -> Any:  # in annotations
        return Any

    __ror__ = __or__


class DeferredPackage:
    """Stands for the package that `import package` or `import package.module` gives, and for some of its names."""

    def __init__(self, module: str, names: Sequence[str]) -> None:
        self._module, self._names = module, names

    def __getattr__(self, name: str) -> Any:
        if name in self._names:
            return Deferred(self._module, name)
        importlib.import_module(self._module)
        return getattr(sys.modules[self._module.partition(".")[0]], name)


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of DEFERRED where they are always found, and loads them by `Loader`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        loader = LOADERS.get(name)
        if loader is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = loader(spec.loader.name, spec.loader.path)
        return spec


class Loader(importlib.machinery.SourceFileLoader):
    """Runs a module whose import statements, in functions too, ask `importing`."""

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in ASK_FOR_COMPILER:
            ask = importing_compiler
            vars(sys.modules["torch"]).setdefault("_dynamo", Unimported())  # until the compiler is imported
        else:
            ask = importing(DEFERRED[module.__name__])
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": ask}
        super().exec_module(module)


def importing(deferred: Mapping[str, Sequence[str]]) -> Any:
    """An `__import__` (of Python's data model) that gives stand-ins of the deferred names."""

    def import_(
        name: str, variables: Any = None, local: Any = None, fromlist: Sequence[str] | None = (), level: int = 0
    ) -> Any:
        source = importlib.util.resolve_name("." * level + name, variables["__package__"]) if level else name
        if source not in deferred:
            return builtins.__import__(name, variables, local, fromlist, level)
        if not fromlist:
            return DeferredPackage(source, deferred[source])
        if deferred[source] is ANY or set(fromlist) <= set(deferred[source]):
            return SimpleNamespace(**{wanted: Deferred(source, wanted) for wanted in fromlist})
        return builtins.__import__(name, variables, local, fromlist, level)

    return import_


class ScanLoader(importlib.machinery.SourceFileLoader):
    """Lets transformers read what its thousands of files offer once and not twice: it asks with a folder's path, and
    then with that of a file in it, and what it remembers is told apart by that."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        scan = vars(module).get(SCAN)
        if scan is not None:
            vars(module)[SCAN] = lambda path: scan(str(Path(path).parent if Path(path).is_file() else path))


SCAN = "create_import_structure_from_path"


# --- the compiler of torch, which is not to look into some functions ---


class CompilerLoader(importlib.machinery.SourceFileLoader):
    """Tells the compiler, once it is imported, what was said to it before."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        for function in Unimported.allowed:
            module.allow_in_graph(function)


class Unimported:
    """Stands for the compiler while nobody has imported it, so that nothing is compiled either."""

    allowed: list[Any] = []
    eval_frame = DeferredPackage("torch._dynamo.eval_frame", ("OptimizedModule",))

    @staticmethod
    def disable(function: Any = None, recursive: bool = True, **more: Any) -> Any:
        """The function, which runs as it is until the compiler is imported, and then as the compiler makes it."""
        if function is None:
            return functools.partial(Unimported.disable, recursive=recursive, **more)
        if not isinstance(function, FunctionType):
            return importlib.import_module(COMPILER).disable(function, recursive, **more)

        @functools.cache
        def disabled() -> Any:
            return importlib.import_module(COMPILER).disable(function, recursive, **more)

        @functools.wraps(function)
        def run(*words: Any, **named: Any) -> Any:
            return (disabled() if COMPILER in sys.modules else function)(*words, **named)

        vars(run)["_torchdynamo_disable"] = True  # how the compiler knows such functions
        return run

    @staticmethod
    def allow_in_graph(function: Any) -> Any:
        Unimported.allowed.append(function)
        return function

    @staticmethod
    def graph_break(*words: Any) -> None:
        """What is not compiled has no graph."""

    @staticmethod
    def assume_constant_result(function: Any) -> Any:
        function._dynamo_marked_constant = True
        return function

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(COMPILER), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(importlib.import_module(COMPILER), name, value)


def importing_compiler(
    name: str, variables: Any = None, local: Any = None, fromlist: Sequence[str] | None = (), level: int = 0
) -> Any:
    """An `__import__` that leaves `torch._dynamo` what stands for it."""
    if name == COMPILER and COMPILER not in sys.modules:
        torch = sys.modules["torch"]
        return vars(torch)["_dynamo"] if fromlist else torch
    return builtins.__import__(name, variables, local, fromlist, level)


LOADERS: dict[str, type[importlib.machinery.SourceFileLoader]] = {
    **dict.fromkeys((*DEFERRED, *ASK_FOR_COMPILER), Loader),
    COMPILER: CompilerLoader,
    "transformers.utils.import_utils": ScanLoader,
}
