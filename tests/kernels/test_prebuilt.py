"""Libraries that come with a wheel: built by one command, used where they fit, refused with the reason where not."""

import json
import platform
import re
import subprocess
import sys

import pytest
import torch

from mmrl import kernels
from mmrl.kernels import compiled, prebuilt, toolchain

ROW = dict(rewards=torch.tensor([1.0, 3.0]), group=torch.zeros(2, dtype=torch.int64), groups=1)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The C++ kernels for this processor, as the command leaves them."""
    folder = tmp_path_factory.mktemp("prebuilt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toolchain, "LEVELS", {toolchain.level(): toolchain.LEVELS[toolchain.level()]})
        patch.setattr(toolchain, "compiler", lambda kind: None if kind == "cuda" else "g++")
        paths, missing = prebuilt.build(folder)
    assert len(paths) == 1 and missing == "no nvcc here: only the C++ kernels were built"
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", paths[0].name]
    return folder


@pytest.fixture
def shipped(built, tmp_path, monkeypatch):
    """A copy of them in a package whose process has loaded nothing yet, on a machine without a compiler."""
    for path in built.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(toolchain, "SHIPPED", tmp_path)
    monkeypatch.setattr(compiled, "_state", {})
    monkeypatch.setattr(compiled, "loaded", {})
    monkeypatch.setattr(compiled, "_backend", "auto")
    monkeypatch.setenv("MMRL_KERNEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    return tmp_path


def change(folder, **facts):
    told = json.loads((folder / "manifest.json").read_text())
    for own in told.values():
        own |= facts
    (folder / "manifest.json").write_text(json.dumps(told))


def test_it_is_used_without_a_compiler(shipped, caplog):
    assert kernels.status()[0].startswith("cpu: built, loaded, numerically right")
    assert compiled.loaded["cpu"].parent == shipped and not caplog.records
    assert kernels.group_advantage(**ROW).advantages.tolist() == pytest.approx([-0.70711, 0.70711], abs=1e-4)
    assert not (shipped / "cache").exists()


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"sources": "0" * 16}, "it was built from other source files"),
        ({"machine": "aarch64"}, f"it is for aarch64, this is {platform.machine()}"),
        ({"level": "AVX1024"}, f"it is for processors with AVX1024, this one has {toolchain.level()}"),
        ({"sha256": "0" * 64}, "mmrl_cpu-.* has another checksum than its manifest says"),
    ],
)
def test_one_that_does_not_fit_is_refused_with_the_reason(shipped, caplog, facts, reason):
    change(shipped, **facts)
    assert kernels.status()[0] == "cpu: not usable, plain PyTorch is used instead: no C++ compiler found"
    (record,) = caplog.records
    assert record.message.startswith("the cpu kernels that came with mmrl are not used, but compiled here: ")
    assert re.search(reason, record.message)


def test_one_that_was_exchanged_is_never_opened(shipped, caplog, monkeypatch):
    (path,) = shipped.glob("*.so")
    path.write_bytes(path.read_bytes() + b" ")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: pytest.fail(f"{path} was opened"))
    kernels.use("auto")
    assert compiled.uses_compiled(torch.zeros(1)) is False
    assert "has another checksum than its manifest says" in caplog.records[0].message
    path.unlink()
    assert prebuilt.fitting("cpu") == (None, f"{path.name} is missing")


def test_an_older_torch_is_told(shipped, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.1+cpu")
    assert prebuilt.fitting("cpu") == (None, "it needs torch 2.11 or later, this is 2.10.1+cpu")


def test_one_that_can_not_be_loaded_is_told_and_compiled_here(built, shipped, caplog, monkeypatch):
    """The same sources give the same bytes."""
    (path,) = shipped.glob("*.so")
    path.write_bytes(b"no library")
    change(shipped, sha256=prebuilt._digest(path))
    monkeypatch.delenv("CXX")
    assert kernels.status()[0].startswith("cpu: built, loaded, numerically right")
    assert compiled.loaded["cpu"].parent == shipped / "cache"
    assert compiled.loaded["cpu"].read_bytes() == (built / path.name).read_bytes()
    assert (
        "are not used, but compiled here: " in caplog.records[0].message
        and "compiling the cpu kernels" in caplog.records[1].message
    )


@pytest.mark.parametrize("text", ["no json", "[]", '{"mmrl_cpu.so": {}}', '{"mmrl_cpu.so": 3}'])
def test_a_broken_manifest_is_told(shipped, text):
    (shipped / "manifest.json").write_text(text)
    path, reason = prebuilt.fitting("cpu")
    assert path is None and reason.startswith(f"{shipped / 'manifest.json'} cannot be read")


def test_without_one_nothing_is_said(shipped):
    (shipped / "manifest.json").unlink()
    assert prebuilt.fitting("cpu") == (None, "")


def test_cuda_must_be_of_the_same_major_version(shipped, monkeypatch):
    (name,) = (path.name for path in shipped.glob("*.so"))
    change(shipped, kind="cuda", cuda="13.0", architectures=["80", "90", "100", "120"])
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    assert prebuilt.fitting("cuda") == (shipped / name, "")
    for other in ("12.8", None):
        monkeypatch.setattr(torch.version, "cuda", other)
        assert prebuilt.fitting("cuda") == (None, f"it was built with CUDA 13.0, this torch with {other}")


@pytest.mark.parametrize(
    ("capability", "runs"),
    [((8, 0), True), ((8, 9), True), ((9, 0), True), ((10, 3), True), ((12, 1), True), ((13, 0), True), ((7, 5), False)]
    + [((11, 0), False)],  # between two of them: neither its code nor older PTX is there
)
def test_which_gpus_it_is_for(capability, runs):
    reason = prebuilt._other_gpu(capability, ["80", "90", "100", "120"])
    assert (reason == "") == runs
    if not runs:
        assert reason == f"it is for sm_80, sm_90, sm_100, sm_120, this GPU is an sm_{capability[0]}{capability[1]}"


def test_the_command_is_documented():
    done = subprocess.run([sys.executable, "-m", "mmrl.kernels", "help"], capture_output=True, text=True)
    assert done.returncode == 2 and "python -m mmrl.kernels build --prebuilt" in done.stderr
