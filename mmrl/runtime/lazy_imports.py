"""Defers imports inside libraries that jobs rarely need, until their names are used.

transformers imports scikit-learn for one decoding with a smaller model and SciPy for losses of detectors; diffusers
imports peft, with LoRA or without. `defer_imports` makes the import statements of those modules, and of no others,
return placeholders. Calling one, reading an attribute or deriving from it imports the real object. `import sklearn`
elsewhere is unchanged. Modules that are imported already, and library versions that import other names, are unaffected.
MMRL_EAGER_IMPORTS=1 turns it off; it is also off where CUDA is visible, since loading a model takes minutes there.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ADAPTERS = {
    "peft": ("PeftModel",),
    "peft.helpers": ("disable_input_dtype_casting",),
    "peft.tuners.tuners_utils": ("BaseTunerLayer",),
}
MATCHING = {"scipy.optimize": ("linear_sum_assignment",)}
SCHEDULERS = (  # schedulers of diffusers that import scipy.stats, for one kind of noise levels
    *("deis_multistep", "dpmsolver_multistep", "dpmsolver_multistep_inverse", "dpmsolver_sde", "dpmsolver_singlestep"),
    *("euler_discrete", "flow_match_euler_discrete", "flow_match_lcm", "heun_discrete", "k_dpm_2_ancestral_discrete"),
    *("k_dpm_2_discrete", "sasolver", "unipc_multistep"),
)
# By importing module: the modules and names that are replaced by placeholders.
DEFERRED: Mapping[str, Mapping[str, Sequence[str]]] = {
    "transformers.generation.candidate_generator": {"sklearn.metrics": ("roc_curve",)},
    **{
        f"transformers.loss.loss_{name}": MATCHING
        for name in ("deformable_detr", "for_object_detection", "grounding_dino", "lw_detr", "rf_detr", "rt_detr")
    },
    "diffusers.hooks.layerwise_casting": ADAPTERS,
    "diffusers.loaders.lora_base": ADAPTERS,
    "diffusers.utils.peft_utils": ADAPTERS,
    "diffusers.pipelines.pipeline_loading_utils": ADAPTERS,
    "diffusers.schedulers.scheduling_lms_discrete": {"scipy": ("integrate",), "scipy.stats": ()},
    **{f"diffusers.schedulers.scheduling_{name}": {"scipy.stats": ()} for name in SCHEDULERS},
}


EAGER = "MMRL_EAGER_IMPORTS"
GPUS = ("/dev/nvidiactl", "/dev/dxg")  # where NVIDIA's driver is, on Linux and in its Windows subsystem


def defer_imports() -> None:
    """Defers the imports of DEFERRED in this process, unless imports are eager. Idempotent."""
    if not eager(os.environ) and not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())


def eager(environment: Mapping[str, str], gpus: Sequence[str] = GPUS) -> bool:
    """Returns whether imports are not deferred: as MMRL_EAGER_IMPORTS=1 says, or because CUDA seems visible, judged
    without importing torch. gpus: device files, of which one exists where a GPU is."""
    hidden = environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return environment.get(EAGER) == "1" or (not hidden and any(Path(gpu).exists() for gpu in gpus))


class Deferred:
    """A placeholder for `name` of the module `source`."""

    def __init__(self, source: str, name: str) -> None:
        self._source, self._name = source, name

    def _target(self) -> Any:
        return getattr(importlib.import_module(self._source), self._name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._target()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target(), name)

    def __instancecheck__(self, thing: object) -> bool:
        # A class that is not imported has no instances.
        return self._source in sys.modules and isinstance(thing, self._target())

    def __subclasscheck__(self, kind: type) -> bool:
        return self._source in sys.modules and issubclass(kind, self._target())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._target(),)

    def __or__(self, other: object) -> object:  # in annotations
        return Any

    __ror__ = __or__


class DeferredPackage:
    """A placeholder for the package that `import package` or `import package.module` binds, with some deferred
    names."""

    def __init__(self, module: str, names: Sequence[str]) -> None:
        self._module, self._names = module, names

    def __getattr__(self, name: str) -> Any:
        """Returns a placeholder for a deferred name; any other name imports the module."""
        if name in self._names:
            return Deferred(self._module, name)
        importlib.import_module(self._module)
        return getattr(sys.modules[self._module.partition(".")[0]], name)


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of LOADERS on the usual path, and has them loaded by their loader there."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns the module's usual spec, with the loader of LOADERS; None for modules that are not in LOADERS."""
        loader = LOADERS.get(name)
        if loader is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = loader(spec.loader.name, spec.loader.path)
        return spec


class Loader(importlib.machinery.SourceFileLoader):
    """Executes a module with the `__import__` of `importing` for all its import statements, also those in functions."""

    def exec_module(self, module: ModuleType) -> None:
        import_function = importing(DEFERRED[module.__name__])
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": import_function}
        super().exec_module(module)


def importing(deferred: Mapping[str, Sequence[str]]) -> Callable[..., Any]:
    """Returns an `__import__` that returns placeholders for the deferred names."""

    def import_(
        name: str,
        variables: Any = None,
        local: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        """Imports like Python's `__import__`, but returns placeholders if all requested names are deferred."""
        source = importlib.util.resolve_name("." * level + name, variables["__package__"]) if level else name
        if source not in deferred:
            return builtins.__import__(name, variables, local, fromlist, level)
        if not fromlist:
            return DeferredPackage(source, deferred[source])
        if set(fromlist) <= set(deferred[source]):
            return SimpleNamespace(**{wanted: Deferred(source, wanted) for wanted in fromlist})
        return builtins.__import__(name, variables, local, fromlist, level)

    return import_


class ScanLoader(importlib.machinery.SourceFileLoader):
    """Makes transformers scan its thousands of files once, not twice: it scans with a folder's path and again with the
    path of a file in it, and its cache distinguishes the two."""

    def exec_module(self, module: ModuleType) -> None:
        """Executes the module, and replaces its function SCAN by one that takes the folder of a file."""
        super().exec_module(module)
        scan = vars(module).get(SCAN)
        if scan is not None:
            vars(module)[SCAN] = lambda path: scan(str(Path(path).parent if Path(path).is_file() else path))


SCAN = "create_import_structure_from_path"


LOADERS: dict[str, type[importlib.machinery.SourceFileLoader]] = {
    **dict.fromkeys(DEFERRED, Loader),
    "transformers.utils.import_utils": ScanLoader,
}
