"""Building, caching, choosing, and what the CUDA compiler made of the sources."""

import multiprocessing
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import triton.backends.nvidia

from mmrl import kernels
from mmrl.kernels import compiled, ops, toolchain

TOOLS = Path(triton.backends.nvidia.__file__).parent / "bin"


@pytest.fixture
def nothing_built(tmp_path, monkeypatch):
    """As in a process that has loaded nothing yet, with an empty cache."""
    monkeypatch.setattr(compiled, "_state", {})
    monkeypatch.setattr(toolchain, "SHIPPED", tmp_path / "none")
    monkeypatch.setenv("MMRL_KERNEL_CACHE", str(tmp_path / "cache"))


def script(path, text):
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


def test_without_a_compiler_the_reference_computes_and_one_line_says_so(nothing_built, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    kernels.use("auto")
    for _ in range(2):
        got = kernels.token_logprob(torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64))
        assert got.entropy.item() == pytest.approx(1.3862944)
    want = "no compiled kernels for cpu, plain PyTorch is used instead: no C++ compiler found"
    assert [record.message for record in caplog.records] == [want]
    assert kernels.status()[0] == "cpu: not usable, plain PyTorch is used instead: no C++ compiler found"
    with pytest.raises(kernels.KernelError, match="kernels.backend=cpu: no C\\+\\+ compiler found"):
        kernels.use("cpu")


def test_a_compiler_that_fails_is_quoted(nothing_built, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("CXX", script(tmp_path / "broken", "echo 'fatal error: out of luck' >&2; exit 1"))
    with pytest.raises(kernels.KernelError, match="kernels.backend=cpu: .*broken failed: fatal error: out of luck"):
        kernels.use("cpu")
    assert not list((tmp_path / "cache").glob("*.so"))


def test_many_ranks_compile_once(nothing_built, monkeypatch, tmp_path):
    """All ask at once; the compiler, which takes its time, is called once and nobody sees half a file."""
    slow = f"echo called >> {tmp_path}/calls; for out; do :; done; echo half > $out; sleep 1; echo whole > $out"
    monkeypatch.setenv("CXX", script(tmp_path / "slow", slow))
    context = multiprocessing.get_context("fork")
    seen = context.Queue()
    ranks = [context.Process(target=lambda: seen.put(toolchain.library("cpu").read_text())) for _ in range(4)]
    for rank in ranks:
        rank.start()
    assert [seen.get(timeout=60) for _ in ranks] == ["whole\n"] * 4
    for rank in ranks:
        rank.join()
    assert (tmp_path / "calls").read_text() == "called\n"


def test_a_library_is_named_by_what_it_was_made_of(tmp_path, monkeypatch):
    monkeypatch.setattr(toolchain, "_compile", lambda kind, target, level: target.write_bytes(b""))
    first = toolchain.library("cpu", tmp_path)
    assert toolchain.library("cpu", tmp_path) == first
    monkeypatch.setattr(toolchain, "CPU_FLAGS", (*toolchain.CPU_FLAGS, "-g"))
    assert toolchain.library("cpu", tmp_path) != first
    sources = shutil.copytree(toolchain.SOURCES, tmp_path / "sources")
    monkeypatch.undo()
    monkeypatch.setattr(toolchain, "_compile", lambda kind, target, level: target.write_bytes(b""))
    monkeypatch.setattr(toolchain, "SOURCES", sources)
    assert toolchain.library("cpu", tmp_path) == first
    (sources / "arithmetic.h").write_text("// changed")
    assert toolchain.library("cpu", tmp_path) != first


def test_backends_by_name():
    with pytest.raises(ValueError, match="kernels.backend must be one of auto, cuda, cpu, torch; got 'fast'"):
        kernels.use("fast")
    if not torch.cuda.is_available():
        with pytest.raises(kernels.KernelError, match="torch sees no CUDA device"):
            kernels.use("cuda")
    x = torch.zeros(1)
    for backend, expected in (("torch", False), ("cpu", True), ("auto", True)):
        kernels.use(backend)
        assert compiled.uses_compiled(x) is expected and compiled.uses_compiled(x, x.double()) is False
        assert compiled.uses_compiled(x.to("meta")) is False


def test_status_finds_wrong_numbers(monkeypatch):
    lines = kernels.status()
    assert any(line.startswith("cpu: built, loaded, numerically right") for line in lines)
    monkeypatch.setattr("mmrl.kernels.reference.HALF_LOG_TAU", 0.9)
    assert kernels.status()[0].startswith("cpu: denoise_step, denoise_logprob is wrong")


# ---- CUDA, compiled for real architectures; no GPU is needed ----------------------------------------------------

ARCHITECTURES = [f"sm_{a}" for a in toolchain.architectures()] if toolchain.compiler("cuda") else []
REGISTERS = {"sm_80": 80, "sm_90": 80}  # so that three blocks of 256 threads fit on a multiprocessor
TWO_BLOCKS = 96  # elsewhere: for these nvcc gives one of the kernels 87 and 90


@pytest.fixture(scope="module")
def cuda_library():
    if not toolchain.compiler("cuda"):
        pytest.skip("needs nvcc")
    return toolchain.library("cuda")  # warnings are errors


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
    of = {a: {k for b, k in resources if a == b} for a in ARCHITECTURES}
    assert len(of["sm_80"]) == 24 and all(
        kernels == of["sm_80"] for kernels in of.values()
    )  # 6 over 3 dtypes, 6 others
    assert f"sm_{toolchain.architectures()[-1]}" in tool("cuobjdump", "-lptx", cuda_library)


def test_no_spills_and_a_register_budget(resources):
    """A few bytes of stack belong to the functions of double precision that the small kernels call."""
    assert len(resources) == 24 * len(ARCHITECTURES)

    def limit(key):
        return REGISTERS.get(key[0], TWO_BLOCKS)

    assert {key: use for key, use in resources.items() if use[0] > limit(key) or use[1] > 16 or use[2]} == {}


def test_wide_loads(cuda_library):
    """Kernels that stream rows read 16 bytes at a time, and touch no local memory."""
    code, kernel = {}, ""
    for line in tool("cuobjdump", "-sass", "-arch", "sm_90", cuda_library).splitlines():
        if match := re.search(r"Function : (\S+)", line):
            kernel = match[1]
            code[kernel] = ""
        elif kernel:
            code[kernel] += line + "\n"
    assert len(code) == 24
    streaming = [
        k for k in code if re.search("denoise_chunks|denoise_gradients|token_chunks|token_gradients|surrogate_[cg]", k)
    ]
    assert len(streaming) == 17
    for k in streaming:
        assert "LDG.E.128" in code[k], k
        if re.search("gradients|denoise_chunks.*Lb1E", k):
            assert "STG.E.128" in code[k], k
    assert not [k for k, text in code.items() if k in streaming and re.search(r"\b(LDL|STL)\b", text)]


def test_the_cuda_library_loads_and_registers_its_kernels(cuda_library):
    torch.ops.load_library(str(cuda_library))
    for schema in ops.SCHEMAS:
        name = schema.split("(")[0]
        key = "CompositeExplicitAutograd" if name.startswith("hidden") else "CUDA"
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"mmrl::{name}", key), name
