"""Every test that takes `device` runs three times: on the torch reference, the C++ kernels and the CUDA kernels."""

import shutil

import pytest
import torch

from mmrl import kernels


@pytest.fixture(autouse=True)
def seeded():
    """Tolerances are of fp32 sums, whose errors have long tails: what is drawn is the same in every run."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned():
    """Memory that a kernel leaves unwritten reads as NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    kernels.use("auto")


@pytest.fixture(params=["torch", "cpu", "cuda"])
def device(request):
    backend = request.param
    if backend == "cuda" and not torch.cuda.is_available():
        pytest.skip("CUDA kernels run on a GPU only")
    if backend == "cpu" and not shutil.which("g++"):
        pytest.skip("C++ kernels need g++")
    kernels.use(backend)
    return "cuda" if backend == "cuda" else "cpu"
