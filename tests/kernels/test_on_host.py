"""cuda.cu itself on the CPU: its kernels, their meetings at barriers and shuffles, and its host code: `on_host.py`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mmrl.kernels import toolchain
from tests.kernels import on_host

ROOT = Path(__file__).parents[2]
MODULES = ("test_advantages.py", "test_surrogate.py", "test_denoise.py", "test_tokens.py")
# What the C++ kernels refuse and CUDA's answer with NaN, for the host does not wait to look.
UNLIKE = ("test_std_that_is_none", "test_target_out_of_range", "test_bad_groups", "test_gae_cut_off_without_bootstrap")
# Hundreds of blocks, which run one after the other, or threads of torch's own.
LONG = ("test_against_the_core", "test_threads_change_nothing", "test_hidden_states_in_bf16", "more_elements_than_an")


def test_every_launch_is_translated():
    source = (toolchain.SOURCES / "cuda.cu").read_text()
    text, launches = on_host.translated(source)
    assert launches == source.count("<<<") == text.count("host::launch(") == 11
    with pytest.raises(AssertionError, match="a launch that is written in another way"):
        on_host.translated(source.replace("THREADS, 0, stream>>>", "128, 0, stream>>>", 1))


def environment(folder, sanitize):
    """In which pytest runs the tests of the C++ kernels on cuda.cu."""
    found = {**os.environ, "MMRL_ON_HOST": str(folder), "MMRL_SANITIZE": sanitize, "OMP_NUM_THREADS": "1"}
    if sanitize:
        found["LD_PRELOAD"] = " ".join(on_host.runtime(name) for name in ("asan", "ubsan", "stdc++"))
        # What python itself never frees is not a fault of the kernels; neither is memory that torch gives back at its
        # end.
        found["ASAN_OPTIONS"] = "detect_leaks=0:halt_on_error=1"
        found["UBSAN_OPTIONS"] = "halt_on_error=1:print_stacktrace=1"
    return found


def run(folder, sanitize, *arguments):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.kernels.on_host",
        "-p",
        "no:cacheprovider",
        *arguments,
    ]
    return subprocess.run(command, cwd=ROOT, env=environment(folder, sanitize), capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_cuda_sources_are_right_on_the_host(module, tmp_path):
    """Odd shapes, strides, bf16 and fp16, forward and backward, against the reference and brute force: whatever the C++
    kernels are asked."""
    chosen = "cpu and " + " and ".join(f"not {name}" for name in (*UNLIKE, *LONG))
    done = run(tmp_path, "", f"tests/kernels/{module}", "-k", chosen)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_operator_agrees_with_the_reference_under_sanitizers(tmp_path):
    """And the sanitizers find neither an address nor a behaviour that is undefined."""
    done = sanitized(["-m", "tests.kernels.exercise"], tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "every operator agrees, at 18 layouts of rows"


def sanitized(arguments, folder):
    found = environment(folder, "address,undefined")
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=found, capture_output=True, text=True)


CALL = """
import torch
from tests.kernels import on_host
from mmrl.kernels import compiled, toolchain
on_host.pytest_configure(None)
from mmrl import kernels
kernels.use("cpu")
x, std = torch.zeros(2, 6), torch.tensor([1.0, -1.0])
print(kernels.denoise_logprob(x, x, x, torch.ones(2), torch.ones(2), std).logp.isnan().tolist())
logits = torch.randn(3, 9001)
print(kernels.token_logprob(logits, torch.tensor([0, -1, 9001])).logp.isnan().tolist())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sound", "fault", "said"),
    [
        ("", "", "[False, True]\n[False, True, True]\n"),
        ("if (row >= in.shape.rows) return;", "if (row > in.shape.rows) return;", "heap-buffer-overflow"),
        ("const bool known = 0 <= y && y < in.shape.vocabulary;", "const bool known = true;", "heap-buffer-overflow"),
    ],
    ids=["sound", "a row too many", "a column that is not there"],
)
def test_a_planted_fault_is_found_by_the_sanitizer(sound, fault, said, tmp_path, monkeypatch):
    """And in the sound source what is not a standard deviation and no token gives NaN in its own row alone."""
    sources = tmp_path / "csrc"
    shutil.copytree(toolchain.SOURCES, sources)
    text = (sources / "cuda.cu").read_text()
    assert sound in text
    (sources / "cuda.cu").write_text(text.replace(sound, fault, 1))
    there = f"toolchain.SOURCES = pathlib.Path({str(sources)!r})"
    call = f"import pathlib\nfrom mmrl.kernels import toolchain\n{there}\n{CALL}"
    done = sanitized(["-c", call], tmp_path / "built")
    assert said in (done.stdout if not fault else done.stderr), done.stderr[-2000:]
    assert (done.returncode == 0) == (not fault)
