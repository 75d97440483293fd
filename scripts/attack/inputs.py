"""Attacks the command line with wrong inputs: keys, values, files, folders and arguments, for all three kinds of job.

    python scripts/attack/inputs.py [--part] [--only WORD ...]

Each case runs `mmrl ...` in a process of its own. A wrong input has to be refused by one line of standard error that
names the mistake, before anything is trained. A harmless input has to train a step. It takes ten minutes on two cores,
with --part two.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
HERE = Path(__file__).parent
AT_ONCE, LIMIT_S = 2, 300.0
REFUSED, ACCEPTED = "one clear line", "accepted"
PRELOADED = (  # before processes are forked, so that each starts at once
    "mmrl.trainer",
    "mmrl.policies.vlm.policy",
    "mmrl.policies.diffusion.policy",
    "mmrl.policies.vla.policy",
    "mmrl.tasks.visual_qa.task",
    "mmrl.tasks.image_generation.task",
    "mmrl.tasks.manipulation.task",
    "mmrl.cli.main",
    "transformers",
    "diffusers",
    "deepspeed",
    "gymnasium",
    "peft",
    "wrong_files",
)


@dataclass
class Try:
    """mmrl ARGUMENTS; wanted: what the line that refuses them names, empty where they are to be accepted."""

    kind: str
    name: str
    arguments: list[str]
    wanted: str
    environment: dict[str, str] = field(default_factory=dict)
    pid: int = 0
    began: float = 0.0
    outcome: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", action="store_true", help="try every sixth case")
    parser.add_argument("--only", nargs="*", default=[], help="try the cases whose kind or name has one of these words")
    parser.add_argument(
        "--slice", nargs=2, type=int, default=(0, 100_000), help="first and last number of the cases to try"
    )
    options = parser.parse_args()
    for module in PRELOADED:
        importlib.import_module(module)
    from table import Table

    table = Table("wrong inputs")
    with tempfile.TemporaryDirectory(prefix="mmrl-attack-") as name:
        folder = Path(name)
        os.environ["MMRL_ROW_CACHE"] = f"{folder}/verdicts"
        (folder / "logs").mkdir()
        apart(lambda: prepare(folder))
        tries = list(every(folder))
        if options.only:
            tries = [t for t in tries if any(word in f"{t.kind}, {t.name}" for word in options.only)]
        tries = (tries[::6] if options.part else tries)[slice(*options.slice)]
        for one in carried_out(tries, folder / "logs"):
            wanted = REFUSED if one.wanted else ACCEPTED
            if one.outcome != wanted:
                print(f"{one.kind}, {one.name}: {one.outcome}", file=sys.stderr, flush=True)
            table.case(one.kind, one.name, lambda one=one: one.outcome, wanted)
    return table.finish()


def apart(action: Callable[[], object]) -> None:
    """Runs it in a process of its own, so that this one has no threads when it forks. Raises RuntimeError."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
            os._exit(0)
        except SystemExit as left:  # of a command that has ended
            os._exit(1 if left.code else 0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError("what is attacked could not be made; see above")


# --- what is tried ---


def prepare(folder: Path) -> None:
    """Files, models, and a run of each kind: one that has ended, and one that has not."""
    import wrong_files

    from mmrl.cli.main import main as mmrl

    found = wrong_files.make(folder)
    wrong_files.models(folder)
    os.chdir(HERE)
    for name, config in found.items():
        apart(lambda name=name, config=config: mmrl(["train", str(config), f"run_dir={folder}/done-{name}"]))
    going = ["steps=2", "checkpoint.every=1", f"run_dir={folder}/going"]
    apart(lambda: mmrl(["train", str(found["visual_qa"]), *going]))
    shutil.rmtree(folder / "going" / "final")


def every(folder: Path) -> Iterator[Try]:
    import wrong_files
    import wrong_inputs

    jobs = {name: folder / f"{name}.yaml" for name in wrong_files.jobs(folder)}
    own = {"visual_qa": wrong_inputs.VISUAL_QA, "images": wrong_inputs.IMAGES, "robots": wrong_inputs.ROBOTS}
    for name, config in jobs.items():
        shared = wrong_inputs.ANY_JOB if name == "visual_qa" else wrong_inputs.ANY_JOB[::3]
        for case in (*shared, *own[name]):
            yield training(f"overrides, {name}", *case, config, folder)
    for kind, job, cases in (
        ("questions", "visual_qa", wrong_files.questions(folder)),
        ("prompts", "images", wrong_files.prompts(folder)),
        ("statistics", "robots", wrong_files.statistics(folder)),
        ("demonstrations", "robots", wrong_files.lerobot(folder)),
    ):
        for case in cases:
            yield training(f"files, {kind}", *case, jobs[job], folder)
    for name, config, wanted in wrong_files.configurations(folder, jobs["visual_qa"]):
        yield Try("configuration files", name, ["train", str(config)], wanted)
    yield from commands(folder, jobs)
    yield from folders(folder, jobs["visual_qa"])


def training(kind: str, name: str, overrides: str, wanted: str, config: Path, folder: Path) -> Try:
    """A run with overrides, which blanks outside of braces and brackets divide."""
    told = split(overrides.replace("{folder}", str(folder)))
    where = [] if any(text.startswith("run_dir=") for text in told) else [f"run_dir={tempfile.mkdtemp(dir=folder)}/run"]
    wanted = wanted.replace("{folder}", str(folder)).replace("{{", "{").replace("}}", "}")
    return Try(kind, name, ["train", str(config), *where, *told], wanted)


def split(text: str) -> list[str]:
    found, depth = [""], 0
    for letter in text:
        depth += (letter in "{[") - (letter in "}]")
        if letter == " " and depth <= 0:
            found.append("")
        else:
            found[-1] += letter
    return [one for one in found if one]


def commands(folder: Path, jobs: dict[str, Path]) -> Iterator[Try]:
    """Arguments of every command."""
    vqa, images = str(jobs["visual_qa"]), str(jobs["images"])
    done, going, free = f"{folder}/done-visual_qa", f"{folder}/going", f"run_dir={folder}/free"
    mistaken = f"{folder}/new-twice"
    Path(mistaken).mkdir(exist_ok=True)
    (Path(mistaken) / "my_term.py").write_text("precious")
    tables: dict[str, list[tuple[str, list[str], str]]] = {
        "mmrl": [
            ("nothing", [], "COMMAND"),
            ("misspelt command", ["trian", vqa], "'trian'"),
            ("override first", ["steps=3", "train", vqa], "steps=3"),
            ("help", ["--help"], ""),
        ],
        "train": [
            ("no configuration", ["train"], "config"),
            ("unknown option", ["train", vqa, "--count", "3"], "--count"),
            ("option before overrides", ["train", vqa, "--print-config", "steps=3"], ""),
            ("option behind overrides", ["train", vqa, "steps=3", "--print-config"], ""),
            ("option between overrides", ["train", vqa, "steps=3", "--print-config", "seed=1"], ""),
            ("dry run", ["train", "--dry-run", vqa, free], ""),
            ("dry run of a wrong key", ["train", "--dry-run", vqa, "stpes=3"], "stpes"),
            ("printing a wrong key", ["train", "--print-config", vqa, "task.rewrads=[]"], "task.rewards"),
            ("printing a wrong kind", ["train", "--print-config", vqa, "task.data.type=nope"], "task.data.type=nope"),
            ("two configurations", ["train", vqa, images], images),
        ],
        "eval": [
            ("no configuration", ["eval", done], ""),
            ("as it is", ["eval", done, vqa], ""),
            ("nothing there", ["eval", "/nope", vqa], "/nope"),
            ("a run that has not ended", ["eval", going, vqa], "final is missing"),
            ("swapped", ["eval", vqa, done], "no configuration file"),
            ("wrong key", ["eval", done, vqa, "evaluaton.prompts=2"], "did you mean evaluation?"),
            ("no prompts", ["eval", done, vqa, "evaluation.prompts=0"], "evaluation.prompts"),
            ("a run of another kind", ["eval", done, images], "done-visual_qa"),
            (
                "a run of another head",
                ["eval", f"{folder}/done-robots", str(jobs["robots"]), "action.head=flow"],
                "action.head",
            ),
            ("another chunk", ["eval", f"{folder}/done-robots", str(jobs["robots"]), "action.chunk=3"], "action.chunk"),
            (
                "other bins",
                ["eval", f"{folder}/done-robots", str(jobs["robots"]), "action.head.bins=16"],
                "action.head.bins",
            ),
            ("empty folder", ["eval", f"{folder}/empty", vqa], "empty"),
            ("a file", ["eval", f"{folder}/good.jsonl", vqa], "good.jsonl"),
            ("a name with blanks", ["eval", "no such model", vqa], "no such model"),
            ("empty name", ["eval", "", vqa], "model"),
        ],
        "sample": [
            ("as it is", ["sample", done, vqa, "--count", "1"], ""),
            ("before overrides", ["sample", done, vqa, "--count", "1", "seed=1"], ""),
            ("count of 0", ["sample", done, vqa, "--count", "0"], "--count"),
            ("count of -3", ["sample", done, vqa, "--count", "-3"], "--count"),
            ("count of text", ["sample", done, vqa, "--count", "many"], "--count"),
            ("count of a fraction", ["sample", done, vqa, "--count", "1.5"], "--count"),
            ("no count", ["sample", done, vqa, "--count"], "--count"),
            ("more than there are", ["sample", done, vqa, "--count", "100000"], ""),
            ("nothing there", ["sample", "/nope", vqa], "/nope"),
        ],
        "config": [
            ("all", ["config"], ""),
            ("a key", ["config", "rollout.temperature"], ""),
            ("misspelt key", ["config", "rollout.temprature"], "did you mean rollout.temperature?"),
            ("no key at all", ["config", "zzz"], "zzz"),
            ("two keys", ["config", "steps", "seed"], "seed"),
            ("empty key", ["config", ""], "key"),
            ("key and value", ["config", "steps=3"], "steps"),
        ],
        "methods": [
            ("all", ["methods"], ""),
            ("a method", ["methods", "cispo"], ""),
            ("misspelt method", ["methods", "cispoo"], "cispo"),
            ("empty method", ["methods", ""], "method"),
            ("two methods", ["methods", "clip", "cispo"], "cispo"),
        ],
        "new": [
            ("as it is", ["new", "term", "MyTerm", "--folder", f"{folder}/new"], ""),
            ("unknown kind", ["new", "loss", "MyLoss"], "'loss'"),
            ("no name", ["new", "term"], "name"),
            ("name with a blank", ["new", "term", "My Term", "--folder", f"{folder}/new-1"], "My Term"),
            ("name of digits", ["new", "term", "3Terms", "--folder", f"{folder}/new-2"], "3Terms"),
            ("name of Python's", ["new", "term", "class", "--folder", f"{folder}/new-3"], "class"),
            ("name that is a path", ["new", "term", "../../Term", "--folder", f"{folder}/new-4"], "Term"),
            ("empty name", ["new", "term", "", "--folder", f"{folder}/new-5"], "name"),
            ("file that is there", ["new", "term", "MyTerm", "--folder", mistaken], "my_term.py"),
            ("folder that is a file", ["new", "term", "MyTerm", "--folder", f"{folder}/good.jsonl"], "good.jsonl"),
            ("folder that nobody can write", ["new", "term", "MyTerm", "--folder", "/proc/x"], "/proc/x"),
        ],
        "doctor": [
            ("as it is", ["doctor"], ""),
            ("argument", ["doctor", "kernels"], "kernels"),
            ("unknown option", ["doctor", "--fix"], "--fix"),
        ],
    }
    for command, cases in tables.items():
        for name, arguments, wanted in cases:
            yield Try(f"arguments of {command}", name, arguments, wanted)
    for name, changed, wanted in (
        ("ranks that cannot share prompts", {"WORLD_SIZE": "3", "RANK": "0"}, "3 ranks"),
        ("a number of ranks that is text", {"WORLD_SIZE": "three", "RANK": "0"}, "WORLD_SIZE"),
        ("a rank beyond the last", {"WORLD_SIZE": "1", "RANK": "5"}, "RANK"),
        ("no ranks", {"WORLD_SIZE": "0", "RANK": "0"}, "WORLD_SIZE"),
    ):
        arguments = ["train", vqa, f"run_dir={tempfile.mkdtemp(dir=folder)}/run"]
        yield Try("environment", name, arguments, wanted, changed)


def folders(folder: Path, config: Path) -> Iterator[Try]:
    """Run directories and checkpoints."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(folder / name, tempfile.mkdtemp(dir=folder), dirs_exist_ok=True))

    def run(name: str, wanted: str, where: Path, *overrides: str) -> Try:
        return Try("run directories", name, ["train", str(config), f"run_dir={where}", *overrides], wanted)

    yield run("a run that has ended", "", copy("done-visual_qa"))
    yield run(
        "a run that has ended, not to be resumed",
        "checkpoint.resume",
        copy("done-visual_qa"),
        "checkpoint.resume=false",
    )
    yield run("a longer run", "", copy("going"), "steps=3")
    yield run("a shorter run", "steps=1", copy("going"), "steps=1", "checkpoint.every=1")
    for key in (
        "optim.eps=0.5",
        "seed=7",
        "rollout.group_size=4",
        "algorithm.surrogate.low=0.1",
        "optim.schedule=linear",
    ):
        yield run(f"resumed with {key}", key.split("=")[0], copy("going"), "steps=3", key)
    yield run(
        "resumed with another model", "model.build", copy("going"), "steps=3", "model.build=odd_parts:build_nothing"
    )
    for name in ("config.yaml", "metrics.jsonl", "versions.json"):
        where = copy("going")
        (where / name).write_bytes(b"\0\xff{")
        yield run(f"{name} is damaged", "", where, "steps=3")  # a checkpoint holds all that is needed
    where = copy("going")
    for file in (where / "checkpoints").rglob("*.json"):
        file.write_text("{")
    yield run("no checkpoint is intact", "checkpoints", where, "steps=3")
    where = copy("going")
    shutil.rmtree(where / "checkpoints")
    yield run("checkpoints are gone", "run_dir=", where, "steps=3", "checkpoint.resume=true")
    where = copy("going")
    shutil.rmtree(where / "checkpoints")
    (where / "checkpoints").write_text("")
    yield run("checkpoints are a file", "checkpoints", where, "steps=3", "checkpoint.every=1")
    where = Path(tempfile.mkdtemp(dir=folder))
    (where / "notes.txt").write_text("precious")
    yield run("a folder with something else in it", "", where)


# --- how it is tried ---


def carried_out(tries: list[Try], logs: Path) -> Iterator[Try]:
    """Each as it ends, AT_ONCE at a time."""
    waiting, running = list(enumerate(tries)), dict[int, tuple[int, Try]]()
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            number, one = waiting.pop(0)
            one.pid, one.began = start(one, logs / str(number)), time.monotonic()
            running[one.pid] = (number, one)
        pid, status = os.waitpid(-1, os.WNOHANG)
        for late in [one for _, one in running.values() if time.monotonic() - one.began > LIMIT_S]:
            with suppress(ProcessLookupError):  # it was killed, and has not been waited for yet
                os.killpg(late.pid, signal.SIGKILL)
        if pid in running:
            number, one = running.pop(pid)
            one.outcome = outcome(one, os.waitstatus_to_exitcode(status), logs / str(number))
            yield one
        elif pid == 0:
            time.sleep(0.01)


def start(one: Try, log: Path) -> int:
    """The id of a process, and of its group, that runs the command and writes to LOG.out and LOG.err."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        for descriptor, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{log}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        os.chdir(HERE)
        os.environ |= one.environment
        sys.path.append(str(HERE))
        from mmrl.cli.main import main as mmrl

        mmrl(one.arguments)
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def outcome(one: Try, code: int, log: Path) -> str:
    out, err = (Path(f"{log}.{kind}").read_text(errors="replace") for kind in ("out", "err"))
    told = [line for line in err.splitlines() if line.startswith("mmrl")]
    last = err.strip().splitlines()[-1] if err.strip() else ""
    if code == -signal.SIGKILL:
        return f"no end in {LIMIT_S:g} s"
    if "Traceback" in out + err:
        return f"traceback: {last[:200]}"
    if code == 0:
        return ACCEPTED
    if code != 2 or len(told) != 1 or last != told[0]:
        return f"ended with {code}: {last[:200]}"
    named = one.wanted in told[0] if one.wanted else False
    return REFUSED if named else f"a line that does not name {one.wanted!r}: {told[0][:300]}"


if __name__ == "__main__":
    sys.exit(main())
