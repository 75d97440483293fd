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
RECIPE = "visual_qa_geometry3k"  # of the job for Slurm
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def slurm():
    lines = (CLUSTER / "slurm.sh").read_text().replace("\\\n", " ").splitlines()
    (line,) = [line for line in lines if line.startswith("srun")]
    return shlex.split(line.partition("||")[0].replace("$recipe", RECIPE))


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
    words = [word for word in words[words.index("mmrl") + 1 :] if word not in ("$@", "run_dir=$run")]
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


def submit(folder, state, *overrides):
    """Runs the job for Slurm on two hosts of three GPUs each, with a scheduler that ends the run in `state` in the
    folder named by run_dir. Returns the exit code, the words of the started command, and what the scheduler was told to
    requeue."""
    commands = {
        "scontrol": 'case $1 in show) echo first; sleep 0.1; echo second ;; requeue) echo "$2" > requeued ;; esac',
        "srun": 'echo "$SRUN_CPUS_PER_TASK $TORCH_ELASTIC_SHUTDOWN_TIMEOUT $*" > started; d=${*: -1}; d=${d#run_dir=}; '
        f'mkdir -p $d; echo \'{{"state": "{state}"}}\' > $d/end.json; exit 1',
    }
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/activate").write_text("")
    for name, script in commands.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (folder / name).chmod(0o755)
    job = {"JOB_ID": "12345", "JOB_NODELIST": "h[1-2]", "NNODES": "2", "GPUS_ON_NODE": "3", "CPUS_PER_TASK": "24"}
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(folder)}
    environment |= {f"SLURM_{key}": value for key, value in job.items()}
    code = subprocess.run(["bash", CLUSTER / "slurm.sh", *overrides], cwd="/", env=environment).returncode
    requeued = folder / "requeued"
    return code, (folder / "started").read_text().split(), requeued.read_text().strip() if requeued.exists() else None


def test_a_job_that_saved_is_requeued_wherever_its_run_is(tmp_path):
    """The state is read in the run directory that the command line names; the port is 20000 + 12345 % 10000."""
    code, words, requeued = submit(tmp_path, "stopped", "run_dir=runs/own", "seed=3")
    assert (code, requeued) == (0, "12345")
    assert words[:2] == ["24", "270"] and words[words.index("--rdzv_endpoint") + 1] == "first:22345"
    assert words[words.index("--nproc_per_node") + 1] == "3" and words[-2:] == ["seed=3", "run_dir=runs/own"]


def test_a_job_that_failed_is_not_requeued(tmp_path):
    """Also if another run, in the job's usual directory, was stopped."""
    usual = tmp_path / "runs" / RECIPE
    usual.mkdir(parents=True)
    (usual / "end.json").write_text('{"state": "stopped"}')
    code, _, requeued = submit(tmp_path, "failed", "run_dir=runs/own")
    assert code != 0 and requeued is None
