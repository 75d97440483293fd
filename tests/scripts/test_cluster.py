"""Containers and clusters: their files parse, and the jobs that they start are jobs of mmrl."""

import re
import shlex
import subprocess
import tomllib

import pytest
import yaml

from mmrl.cli.main import parser
from mmrl.config import load
from tests.helpers.pages import ROOT

CLUSTER, DOCKER = ROOT / "scripts/cluster", ROOT / "scripts/docker/Dockerfile"
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def slurm():
    lines = (CLUSTER / "slurm.sh").read_text().replace("\\\n", " ").splitlines()
    (line,) = [line for line in lines if line.startswith("srun")]
    return shlex.split(line.partition("||")[0])


def kubernetes():
    (container,) = yaml.safe_load((CLUSTER / "kubernetes.yaml").read_text())["spec"]["template"]["spec"]["containers"]
    return [*container["command"], *container["args"]]


def skypilot():
    return shlex.split(yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())["run"].splitlines()[-1])


def docker():
    text = DOCKER.read_text().replace("\\\n#", " ")
    return [shlex.split(line.lstrip("# ")) for line in text.splitlines() if line.startswith("#   docker run")]


@pytest.mark.parametrize("command", [slurm, kubernetes, skypilot])
def test_a_job_is_one_of_mmrl(command):
    words = command()
    words = [word for word in words[words.index("mmrl") + 1 :] if word != "$@"]
    options = parser().parse_args(words)
    config = load(options.config, options.overrides)
    assert config.model.path.startswith("Qwen/") and config.checkpoint.resume == "auto"


def test_containers_start_jobs_of_mmrl():
    runs = docker()
    assert len(runs) == 2
    for words in runs:
        image = next(at for at, word in enumerate(words) if word in ("mmrl", "mmrl-cuda"))
        options = parser().parse_args(words[image + 1 :])
        load(options.config, options.overrides)


def test_the_scripts_parse():
    subprocess.run(["bash", "-n", CLUSTER / "slurm.sh"], check=True)
    directives = re.findall(r"^#SBATCH (--[a-z-]+=?\S*)$", (CLUSTER / "slurm.sh").read_text(), flags=re.M)
    assert {"--requeue", "--signal=TERM@300", "--nodes=2"} <= set(directives)
    job = yaml.safe_load((CLUSTER / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    assert (job["apiVersion"], job["kind"], pod["restartPolicy"]) == ("batch/v1", "Job", "OnFailure")
    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("path", [DOCKER, CLUSTER / "skypilot.yaml"], ids=lambda path: path.name)
def test_extras_exist(path):
    named = re.findall(r"EXTRAS=([a-z,]+)", path.read_text())
    assert named and all(extra in EXTRAS for extras in named for extra in extras.split(","))
