"""Findings of checks, and advice by error message."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["works", "fails", "needs a GPU", "not installed"]


@dataclass(frozen=True)
class Finding:
    """The result of one check. message: one line. advice: what to do about a failure. lines: Markdown for the report,
    such as a table."""

    name: str
    status: Status
    message: str
    advice: str = ""
    lines: tuple[str, ...] = field(default=())

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "lines": list(self.lines)}

    @classmethod
    def of(cls, values: dict[str, Any]) -> Finding:
        return cls(**{**values, "lines": tuple(values["lines"])})


# Patterns of error messages, and advice; the first match counts.
ADVICE = (
    (
        r"driver version is insufficient|driver too old",
        "update the NVIDIA driver, or install a torch for an older CUDA",
    ),
    (
        r"no kernel image is available",
        "this torch or these kernels lack the GPU's architecture: install a newer torch, and set kernels.backend=torch "
        "until `python -m mmrl.kernels` has built for it",
    ),
    (
        r"Duplicate GPU|finds \d+ GPUs?",
        "start one rank a GPU with torchrun, which sets LOCAL_RANK, and look at CUDA_VISIBLE_DEVICES",
    ),
    (
        r"out of memory|OutOfMemory",
        "ask what fits: mmrl train CONFIG --dry-run --gpu GIB; nvidia-smi says who else is on the GPU",
    ),
    (
        r"NCCL|nccl[SU]",
        "set NCCL_DEBUG=INFO and run again; NCCL_SOCKET_IFNAME names the network, NCCL_P2P_DISABLE=1 and "
        "NCCL_IB_DISABLE=1 tell whether links between GPUs or hosts are at fault",
    ),
    (
        r"GLOO|gloo|Connection (refused|reset)|getaddrinfo",
        "GLOO_SOCKET_IFNAME names the network where host names do not resolve, such as lo for one host",
    ),
    (r"no C\+\+ compiler|nvcc", "install g++ and the CUDA toolkit (nvcc), or a wheel with prebuilt kernels"),
    (
        r"is wrong: differs from the torch reference",
        "set kernels.backend=torch and report it with this page",
    ),
    (
        r"EGL|egl[A-Z]|osmesa|GLX|libGL",
        "bash scripts/system_packages.sh installs what renders; on a GPU libegl1 and the driver's own EGL, and "
        "MUJOCO_EGL_DEVICE_ID must name a GPU that is there",
    ),
    (
        r"[Vv]ulkan|physx|sapien",
        "bash scripts/install_renderer.sh; on a GPU the driver must bring Vulkan (in a container "
        "NVIDIA_DRIVER_CAPABILITIES=all)",
    ),
    (r"vLLM|vllm", "see mmrl/generation/README.md; rollout.generator=transformers needs no vLLM"),
    (r"time limit", "run it again with a higher --limit, or look at its log for where it stands"),
)


def advice_for(message: str) -> str:
    """Returns advice for an error message."""
    return next((advice for pattern, advice in ADVICE if re.search(pattern, message)), "read its log, named beside it")
