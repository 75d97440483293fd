"""Building, caching, choosing, and what the CUDA compiler made of the sources."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton.backends.nvidia

from mmrl import kernels
from mmrl.kernels import compiled

TOOLS = Path(triton.backends.nvidia.__file__).parent / "bin"
PRINT_BACKEND = """
import logging, sys, torch
logging.basicConfig(format="%(message)s", stream=sys.stdout)
from mmrl import kernels
for _ in range(2):
    print(kernels.token_logprob(torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64)).entropy.item())
"""


def run(code, **env):
    env = {**os.environ, "PYTHONPATH": str(Path(kernels.__file__).parents[2]), **env}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=200)


def test_without_a_compiler_the_reference_computes_and_one_line_says_so(tmp_path):
    done = run(PRINT_BACKEND, CXX="no-such-compiler", MMRL_KERNEL_CACHE=str(tmp_path))
    lines = done.stdout.splitlines()
    assert lines[0] == "no compiled kernels for cpu, the torch reference computes: no C++ compiler found"
    assert [float(line) for line in lines[1:]] == pytest.approx([1.3862944] * 2), done.stderr


def test_a_compiler_that_fails_is_quoted(tmp_path):
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'fatal error: out of luck' >&2\nexit 1\n")
    compiler.chmod(0o755)
    done = run(PRINT_BACKEND, CXX=str(compiler), MMRL_KERNEL_CACHE=str(tmp_path))
    assert f"{compiler} failed: fatal error: out of luck" in done.stdout.splitlines()[0], done.stderr
    code = "from mmrl import kernels; kernels.use('cpu')"
    done = run(code, CXX=str(compiler), MMRL_KERNEL_CACHE=str(tmp_path))
    assert "KernelError: kernels.backend=cpu:" in done.stderr and "out of luck" in done.stderr
    assert not list(tmp_path.glob("*.so"))


def test_many_ranks_compile_once(tmp_path):
    """Four processes ask at once; the compiler, which takes its time, is called once and nobody sees half a file."""
    compiler, built = tmp_path / "slow", compiled.library("cpu")
    compiler.write_text(
        f"#!/bin/sh\necho called >> {tmp_path}/calls\nfor out; do :; done\n"
        f"head -c 1000 {built} > $out; sleep 1; cp {built} $out\n"
    )
    compiler.chmod(0o755)
    env = {**os.environ, "PYTHONPATH": str(Path(kernels.__file__).parents[2])}
    env |= {"CXX": str(compiler), "MMRL_KERNEL_CACHE": str(tmp_path / "cache")}
    code = "from mmrl import kernels; kernels.use('cpu')"
    ranks = [subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE) for _ in range(3)]
    assert [rank.wait(200) for rank in ranks] == [0, 0, 0], [rank.stderr.read() for rank in ranks]
    assert (tmp_path / "calls").read_text().splitlines() == ["called"]


def test_a_library_is_named_by_what_it_was_made_of(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "_compile", lambda kind, target: target.write_bytes(b""))
    first = compiled.library("cpu", tmp_path)
    assert compiled.library("cpu", tmp_path) == first
    monkeypatch.setattr(compiled, "CPU_FLAGS", (*compiled.CPU_FLAGS, "-g"))
    assert compiled.library("cpu", tmp_path) != first
    sources = shutil.copytree(compiled.SOURCES, tmp_path / "sources")
    monkeypatch.undo()
    monkeypatch.setattr(compiled, "_compile", lambda kind, target: target.write_bytes(b""))
    monkeypatch.setattr(compiled, "SOURCES", sources)
    assert compiled.library("cpu", tmp_path) == first
    (sources / "arithmetic.h").write_text("// changed")
    assert compiled.library("cpu", tmp_path) != first


def test_backends_by_name():
    with pytest.raises(ValueError, match="kernels.backend must be one of auto, cuda, cpu, torch; got 'fast'"):
        kernels.use("fast")
    if not torch.cuda.is_available():
        with pytest.raises(kernels.KernelError, match="torch sees no CUDA device"):
            kernels.use("cuda")
    x = torch.zeros(1)
    for backend, expected in (("torch", False), ("cpu", True), ("auto", True)):
        kernels.use(backend)
        assert compiled.chosen(x) is expected and compiled.chosen(x, x.double()) is False
        assert compiled.chosen(x.to("meta")) is False


def test_status_finds_wrong_numbers(monkeypatch):
    lines = kernels.status()
    assert any(line.startswith("cpu: built, loaded, numerically right") for line in lines)
    monkeypatch.setattr("mmrl.kernels.reference.HALF_LOG_TAU", 0.9)
    assert any("cpu: denoise_logprob is wrong" in line for line in kernels.status())


# ---- CUDA, compiled for real architectures; no GPU is needed ----------------------------------------------------

REGISTERS = 64  # so that four blocks of 256 threads fit on a multiprocessor


@pytest.fixture(scope="module")
def cuda_library():
    if not compiled._compiler("cuda"):
        pytest.skip("needs nvcc")
    return compiled.library("cuda")  # warnings are errors


def tool(name, *args):
    return subprocess.run([TOOLS / name, *map(str, args)], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def resources(cuda_library):
    """(architecture, kernel) -> registers, stack, local memory"""
    found, architecture, kernel = {}, "", ""
    for line in tool("cuobjdump", "-res-usage", cuda_library).splitlines():
        if match := re.search(r"arch = (sm_\d+)", line):
            architecture = match[1]
        if match := re.search(r"Function (\S+):", line):
            kernel = match[1]
        if match := re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", line):
            found[architecture, kernel] = tuple(map(int, match.groups()))
    return found


def test_every_kernel_is_there_for_every_architecture_and_as_ptx(cuda_library, resources):
    of = {a: {k for b, k in resources if a == b} for a in ("sm_80", "sm_90")}
    assert of["sm_80"] == of["sm_90"] and len(of["sm_80"]) == 20  # 5 over 3 dtypes, and 5 others
    assert "compute_90" in tool("cuobjdump", "-lptx", cuda_library) or "sm_90.ptx" in tool(
        "cuobjdump", "-lptx", cuda_library
    )


def test_no_spills_and_a_register_budget(resources):
    bad = {key: use for key, use in resources.items() if use[0] > REGISTERS or use[1] or use[2]}
    assert bad == {}


def test_wide_loads(cuda_library):
    """Kernels that stream rows read 16 bytes at a time, and no kernel touches local memory."""
    code, kernel = {}, ""
    for line in tool("cuobjdump", "-sass", "-arch", "sm_90", cuda_library).splitlines():
        if match := re.search(r"Function : (\S+)", line):
            kernel = match[1]
            code[kernel] = ""
        elif kernel:
            code[kernel] += line + "\n"
    assert len(code) == 20
    streaming = [
        k for k in code if re.search("denoise_chunks|denoise_gradients|token_chunks|token_gradients|surrogate_[cg]", k)
    ]
    assert len(streaming) == 17
    for k in streaming:
        assert "LDG.E.128" in code[k], k
        if "gradients" in k or "denoise_chunksIfLb1" in k:
            assert "STG.E.128" in code[k], k
    assert not [k for k, text in code.items() if re.search(r"\b(LDL|STL)\b", text)]


def test_the_cuda_library_loads_and_registers_its_kernels(cuda_library):
    code = f"""
import torch
from mmrl.kernels import ops
torch.ops.load_library({str(cuda_library)!r})
for schema in ops.SCHEMAS:
    name = "mmrl::" + schema.split("(")[0]
    keys = ["CompositeExplicitAutograd"] if "hidden" in name else ["CUDA"]
    assert all(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys), name
print("registered")
"""
    done = run(code)
    assert done.stdout == "registered\n", done.stderr
