"""`mmrl doctor --gpu`: what is run, what is kept, and what is said. Processes are real in the slow tests; in the others
a recorder stands where they are started."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml

from mmrl import sims
from mmrl.cli.main import main
from mmrl.doctor import checks
from mmrl.doctor.checks import CHECKS, compare_to_estimate, judge_metrics, rank_results
from mmrl.doctor.results import CheckResult, advice_for
from mmrl.doctor.run import RECIPE, Check, diagnose, run_in_process
from mmrl.sims.registry import RendererStatus
from tests.helpers.processes import gone

HERE = {"torch": "2.13.0", "gpus": "none"}


class Recorder:
    """Starts nothing: writes the findings that it was given for a check, and remembers commands."""

    def __init__(self, **given):
        self.given, self.commands, self.limits = given, [], []

    def __call__(self, command, log, limit):
        self.commands.append(command)
        self.limits.append(limit)
        name, folder = command[3], command[4]
        given = self.given.get(name, [CheckResult(name, "works", "at once")])
        if isinstance(given, str):
            return given
        (log.parent / "findings.json").write_text(json.dumps([result.to_dict() for result in given]))
        assert str(log.parent) == folder
        return None

    @property
    def started(self):
        return [command[3] for command in self.commands]


def examine(folder, recorder, names=("ranks", "kernels"), machine=HERE, **options):
    said = []
    found = diagnose([Check(n) for n in names], folder, machine, run=recorder, print_line=said.append, **options)
    return found, said


def test_checks_run_in_their_order_each_in_a_process_of_its_own(tmp_path):
    recorder = Recorder()
    found, _ = examine(tmp_path, recorder, tuple(CHECKS), limit=7)
    assert recorder.started == list(CHECKS) and set(recorder.limits) == {7}
    assert recorder.commands[0] == [sys.executable, "-m", "mmrl.doctor.checks", "ranks", str(tmp_path / "ranks")]
    assert [f.name for f in found] == list(CHECKS)


def test_the_same_command_goes_on_where_it_was_stopped(tmp_path):
    class Stopped(Recorder):
        def __call__(self, command, log, limit):
            if command[3] == "kernels":
                raise KeyboardInterrupt
            return super().__call__(command, log, limit)

    with pytest.raises(KeyboardInterrupt):
        examine(tmp_path, Stopped())
    assert "| ranks | works |" in (tmp_path / "report.md").read_text()
    recorder = Recorder()
    found, said = examine(tmp_path, recorder)
    assert recorder.started == ["kernels"] and said[0] == "ranks: passed before" and len(found) == 2


def test_what_fails_is_looked_at_again_and_what_works_is_not(tmp_path):
    examine(tmp_path, Recorder(ranks=[CheckResult("ranks", "fails", "NCCL error")]))
    recorder = Recorder()
    found, _ = examine(tmp_path, recorder)
    assert recorder.started == ["ranks"] and {f.status for f in found} == {"works"}
    assert examine(tmp_path, rerun := Recorder(), rerun=True) and rerun.started == ["ranks", "kernels"]


def test_another_machine_is_looked_at_anew(tmp_path):
    examine(tmp_path, Recorder())
    recorder = Recorder()
    examine(tmp_path, recorder, machine={**HERE, "gpus": "H100"})
    assert recorder.started == ["ranks", "kernels"]


@pytest.mark.parametrize(
    "problem", ["the process of the check ended with exit code -11", "the check took longer than its time limit of 5 s"]
)
def test_a_check_that_dies_or_hangs_fails_and_the_next_one_runs(tmp_path, problem):
    recorder = Recorder(ranks=problem)
    found, _ = examine(tmp_path, recorder)
    assert [f.status for f in found] == ["fails", "works"] and recorder.started == ["ranks", "kernels"]
    assert problem in found[0].message and found[0].advice and "log.txt" in found[0].message


def test_a_check_that_writes_nothing_fails(tmp_path):
    found, _ = examine(tmp_path, Recorder(ranks=[]))
    assert found[0].status == "fails" and "wrote no results" in found[0].message


def test_the_report_has_everything_and_says_what_to_do(tmp_path):
    table = CheckResult("kernels", "works", "see the table", lines=("| operator |", "| --- |", "| a |"))
    missing = CheckResult("NCCL", "needs a GPU", "no GPU here")
    broken = CheckResult("ranks", "fails", "Duplicate | GPU detected", advice_for("Duplicate GPU detected"))
    examine(tmp_path, Recorder(ranks=[broken, missing], kernels=[table]))
    lines = (tmp_path / "report.md").read_text().splitlines()
    assert "torch 2.13.0, gpus none" in lines and "1 works, 1 fails, 1 needs a GPU" in lines
    assert "| ranks | fails | Duplicate \\| GPU detected |" in lines and "| NCCL | needs a GPU | no GPU here |" in lines
    todo = lines.index("## What to do")
    assert lines[todo + 2].startswith("- ranks: start one rank a GPU with torchrun")
    assert lines[lines.index("## kernels") + 2 :] == ["| operator |", "| --- |", "| a |"]


def test_a_recipe_of_the_users_own_has_a_place_of_its_own(tmp_path):
    one, other = Check(RECIPE, ("a.yaml", "steps=1")), Check(RECIPE, ("a.yaml", "steps=2"))
    assert one.folder_name != other.folder_name and one.folder_name.startswith("recipe-")
    recorder = Recorder()
    diagnose([one], tmp_path, HERE, run=recorder, print_line=lambda _: None)
    assert recorder.commands[0][3:] == ["recipe", str(tmp_path / one.folder_name), "a.yaml", "steps=1"]


# --- what is judged ---


def seen(*gpus, backend="nccl", names=None):
    told = [{"gpu": gpu, "name": name} for gpu, name in zip(gpus, names or ["H100"] * len(gpus), strict=True)]
    return {"ranks": told, "backend": backend, "mebibytes": 256, "gigabytes_per_second": 90.0, "objects_ms": 1.0}


def test_ranks_are_judged_by_the_gpus_that_they_saw():
    first, *others = rank_results(seen("a", "b"), 2)
    assert (first.name, first.status, first.message) == ("a GPU for each rank", "works", "2 x H100")
    assert [f.status for f in others] == ["works", "works"] and "90.00 GB/s" in others[0].message
    assert (
        rank_results(seen("a", "a"), 2)[0].status == "fails" and "share" in rank_results(seen("a", "a"), 2)[0].message
    )
    mixed = rank_results(seen("a", "b", names=["A100", "H100"]), 2)[0]
    assert mixed.status == "fails" and mixed.message == "GPUs differ: A100, H100"


def test_without_a_gpu_nothing_that_needs_one_is_said_to_work():
    found = {f.name: f.status for f in rank_results(seen("cpu", "cpu", backend="gloo"), 0)}
    assert found == {
        "a GPU for each rank": "needs a GPU",
        "NCCL sums over ranks": "needs a GPU",
        "gloo sums over 2 ranks": "works",
        "gloo gathers objects": "works",
    }


def test_memory_is_held_against_the_estimate():
    assert compare_to_estimate("x", 20.0, 21.0).status == "works"
    low, high = compare_to_estimate("x", 20.0, 18.0), compare_to_estimate("x", 20.0, 26.0)
    assert (low.status, high.status) == ("fails", "fails") and "too low" in low.advice and "too high" in high.advice
    assert compare_to_estimate("x", 0.1, 1.0).status == "works"  # a gibibyte of CUDA's own


@pytest.mark.parametrize("own", [checks.LANGUAGE, checks.IMAGES])
def test_the_memory_of_tiny_models_is_estimated_from_their_folders(own, tmp_path):
    """A million weights, twice, with gradients and moments: tens of MiB."""
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(own))
    overrides = ["model.dtype=bfloat16", "engine.zero_stage=1"]
    found = checks.estimate_gib(tmp_path / "recipe.yaml", overrides, 80 * 2**30, tmp_path / "model")
    assert 0.002 < found < 0.2


class Lit:
    """A simulator whose images are grey: here no GPU renders."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def reset(self, seeds, tasks):
        pass

    def observation(self):
        return SimpleNamespace(images=torch.full((2, 3, 4, 4), 128, dtype=torch.uint8))


@pytest.mark.parametrize(("backend", "status"), [("egl", "works"), ("osmesa", "fails")])
def test_images_on_a_gpu_come_from_egl(monkeypatch, tmp_path, backend, status):
    monkeypatch.setenv("MUJOCO_GL", "osmesa")  # the check changes both, and they are put back
    monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", "0")
    monkeypatch.setattr(checks, "has_gpu", lambda: True)
    monkeypatch.setattr(sims, "build", lambda *_: Lit())
    monkeypatch.setattr(sims, "renderers", lambda: {"mujoco": RendererStatus(backend)})
    works, egl = checks.check_renderers(tmp_path)
    assert (works.status, egl.status) == ("works", status) and works.message.startswith(f"by {backend}, two images")


def test_three_steps_are_three():
    step = {"loss": 1.0, "grad_norm": 2.0, "surrogate/ratio_gap_max": 0.0, "memory/gpu_gib": 1.5}
    good = judge_metrics("x", [step] * 3, 4.0)
    assert good.status == "works" and good.message == "3 steps in 4 s, memory/gpu_gib 1.5"
    assert judge_metrics("x", [step] * 2, 4.0).status == "fails"
    assert judge_metrics("x", [step, {**step, "grad_norm": float("nan")}, step], 4.0).status == "fails"


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        ("CUDA driver version is insufficient for CUDA runtime version", "update the NVIDIA driver"),
        ("no kernel image is available for execution on the device", "kernels.backend=torch"),
        ("torch.OutOfMemoryError: CUDA out of memory", "--dry-run --gpu"),
        ("ncclSystemError: System call failed", "NCCL_DEBUG=INFO"),
        ("rank 3 of this host finds 2 GPUs", "LOCAL_RANK"),
        ("failed to find a rendering device: vulkan", "install_renderer.sh"),
        ("something else", "log"),
    ],
)
def test_errors_have_advice(error, advice):
    assert advice in advice_for(error)


# --- for real ---


def test_a_process_that_takes_too_long_ends_with_its_children(tmp_path):
    sleeps = "import subprocess; child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True); child.wait()"
    assert "time limit of 5 s" in run_in_process([sys.executable, "-c", sleeps], tmp_path / "log", 5)
    assert gone([int((tmp_path / "log").read_text())])
    assert (
        run_in_process([sys.executable, "-c", "import sys; sys.exit(3)"], tmp_path / "log", 60)
        == "the process of the check ended with exit code 3"
    )
    assert run_in_process([sys.executable, "-c", "print('here')"], tmp_path / "log", 60) is None
    assert (tmp_path / "log").read_text() == "here\n"


def test_an_error_of_a_check_is_a_finding(tmp_path, monkeypatch):
    def broken(folder):
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setitem(checks.CHECKS, "kernels", broken)
    monkeypatch.setattr(sys, "argv", ["checks", "kernels", str(tmp_path)])
    checks.main()
    (told,) = json.loads((tmp_path / "findings.json").read_text())
    assert told["status"] == "fails" and "out of memory" in told["message"] and "--dry-run" in told["advice"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu", "--only", "ranks,kernel"], "--only=kernel is not a check; choose from ranks, kernels"),
        (["--gpu", "model.path=x"], "model.path=x needs --recipe"),
        (["--only", "ranks"], "--only needs --gpu"),
        (["kernels"], "kernels needs --gpu"),
    ],
)
def test_a_wrong_question_is_one_line(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *words])
    err = capsys.readouterr().err
    assert ended.value.code == 2 and said in err and err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_on_this_machine_everything_that_can_works(tmp_path, capsys):
    """All checks but those of vLLM, which have tests of their own; a second time nothing is started."""
    names = "ranks,kernels,renderers,language,images,robots"
    command = ["doctor", "--gpu", "--folder", str(tmp_path), "--only", names]
    for known in (False, True):
        with pytest.raises(SystemExit) as ended:
            main(command)
        out = capsys.readouterr().out
        assert ended.value.code == 0, out
        assert out.count(": known") == (6 if known else 0)
    report = (tmp_path / "report.md").read_text()
    assert "0 fails" in report and "| operator | ours ms | eager ms | torch.compile ms |" in report
