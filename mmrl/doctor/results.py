"""Results of the checks of `mmrl doctor --gpu`, and advice for error messages."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["works", "fails", "needs a GPU", "not installed"]


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    name: what works if the check passes, such as "MuJoCo renders". message: one line. advice: what to do about a
    failure. lines: Markdown for the report, such as a table.
    """

    name: str
    status: Status
    message: str
    advice: str = ""
    lines: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "lines": list(self.lines)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> CheckResult:
        return cls(**{**values, "lines": tuple(values["lines"])})


# (regular expression, advice) for error messages; the first match is used.
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
        "NCCL_IB_DISABLE=1 show whether links between GPUs or hosts are the cause",
    ),
    (
        r"GLOO|gloo|Connection (refused|reset)|getaddrinfo",
        "set GLOO_SOCKET_IFNAME to the network interface if host names do not resolve, such as lo on one host",
    ),
    (r"no C\+\+ compiler|nvcc", "install g++ and the CUDA toolkit (nvcc), or a wheel with prebuilt kernels"),
    (
        r"is wrong: differs from plain PyTorch",
        "set kernels.backend=torch and report it with this page",
    ),
    (
        r"EGL|egl[A-Z]|osmesa|GLX|libGL",
        "install the renderers with bash scripts/system_packages.sh; a GPU needs libegl1 and the driver's own EGL, and "
        "MUJOCO_EGL_DEVICE_ID must be the number of an existing GPU",
    ),
    (
        r"[Vv]ulkan|physx|sapien",
        "bash scripts/install_renderer.sh; on a GPU the driver must bring Vulkan (in a container "
        "NVIDIA_DRIVER_CAPABILITIES=all)",
    ),
    (r"vLLM|vllm", "see mmrl/generation/README.md; rollout.generator=transformers needs no vLLM"),
    (r"time limit", "run it again with a higher --limit, or see in its log where it stopped"),
)


def advice_for(message: str) -> str:
    """Returns the advice of the first pattern in ADVICE that the error message matches."""
    return next((advice for pattern, advice in ADVICE if re.search(pattern, message)), "read its log file, named above")
