"""The command that adds an extra: from a checkout, and from a wheel, where there is no checkout to name."""

import importlib.metadata
import tomllib
from pathlib import Path

from mmrl.runtime import installation
from mmrl.runtime.installation import extra_command, extra_with

ROOT = Path(__file__).parents[2]


def test_in_a_checkout_its_extra_is_named():
    assert extra_command("mujoco", "parquet") == "pip install -e '.[mujoco,parquet]'"


def test_of_a_wheel_the_packages_are_named(tmp_path, monkeypatch):
    declared = [
        "torch>=2.11",
        "numpy; python_version >= '3.11'",
        'mujoco<4,>=3.3.7; extra == "mujoco"',
        'imageio[ffmpeg]; extra == "mujoco"',
        'ray<3,>=2.60; extra == "ray"',
    ]
    monkeypatch.setattr(installation, "CHECKOUT", tmp_path)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: declared)
    assert extra_command("ray") == "pip install 'ray<3,>=2.60'"
    assert extra_command("mujoco") == "pip install 'mujoco<4,>=3.3.7' 'imageio[ffmpeg]'"


def test_the_distribution_is_this_one():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"] == installation.DISTRIBUTION
    assert installation.CHECKOUT == ROOT


def test_the_extra_that_installs_a_package_is_known_by_the_packages_name():
    """mani_skill is written mani-skill in its requirement; torch is of mmrl itself, mypy of the extra dev alone."""
    extras = [extra_with(name) for name in ("diffusers", "mani_skill", "torch", "mypy", "nowhere")]
    assert extras == ["diffusion", "maniskill", None, None, None]
