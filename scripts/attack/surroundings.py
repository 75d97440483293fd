"""Attacks a run by its surroundings: full disks, directories that are renamed or read-only, clocks that jump, files of
another user, chat templates that loop, killed ranks, kills during evaluations and while responses are unfinished,
rewards that change or end the process in which they run.

    python scripts/attack/surroundings.py [--part] [--only PATTERN]

A run has to end with one line that names the cause and with an exit code other than 0. When the cause is gone, the same
command has to resume it, with the weights of a run that was not attacked. It needs Linux. Some cases mount disks, which
needs root; without root they are left out. Exits with 1 if a case had an unexpected result.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from scripts.attack import hostile_surroundings as hostile  # noqa: E402
from scripts.attack.resume import state_of  # noqa: E402
from scripts.attack.table import Table  # noqa: E402
from tests.whole_runs.parts import TINY, command, errors_told, metrics, model_folder, start  # noqa: E402

WAIT_S = 300.0
DISK_MIB = 64
RUN = ["steps=4", "checkpoint.every=1", "optim.ema=0.5", "evaluation.every=2", "checkpoint.best=true"]
RUN += ["log.samples_every=1", "log.tensorboard=true"]
OWN = "scripts.attack.hostile_surroundings"
LONG = ["steps=40", "evaluation.every=0", "checkpoint.best=false"]  # so that it is going on when it is attacked
GOES_ON = "named in one line; the same command goes on, equal"
FULL = {  # what is written when the disk has no byte left, and the step that is then reached
    "the configuration": r"config\.yaml\.pending$",
    "the versions": r"versions\.json\.pending$",
    "TensorBoard's events": r"events\.out",
    "metrics, behind a checkpoint": r"step-000001$",
    "the page of samples": r"samples/train-000002\.html$",
    "a checkpoint's folder": r"step-000002\.pending$",
    "a checkpoint's shared state": r"step-000002\.pending/trainer\.json$",
    "a checkpoint's manifest": r"step-000002\.pending/manifest\.json$",
    "the best weights": r"best\.pending$",
    "the final weights": r"final\.pending$",
    "the manifest of the final weights": r"final\.pending/manifest\.json$",
}


class Surroundings:
    """What the attacks share: a folder, a run without an attack, and the outcome of one with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._whole: dict[tuple[str, ...], Path] = {}
        self._made = 0

    def new(self) -> Path:
        self._made += 1
        return self.folder / f"run-{self._made}"

    def whole(self, *more: str) -> Path:
        if more not in self._whole:
            run = self._whole[more] = self.new()
            code, said = self.run(command, run, *more)
            assert code == 0, said
        return self._whole[more]

    def start(self, target: Callable[..., None], run: Path, *more: str, before: tuple = (), ranks: int = 1) -> list:
        settings = ["train", str(TINY), *RUN, *more, f"run_dir={run}"]
        return start(target, *before, *settings, log=self.log(run), ranks=ranks)

    def run(self, target: Callable[..., None], run: Path, *more: str, before: tuple = (), ranks: int = 1):
        """Returns the exit code of the first rank, and what was printed."""
        self.log(run).unlink(missing_ok=True)
        return self.ended(self.start(target, run, *more, before=before, ranks=ranks), run)

    def ended(self, processes: list, run: Path) -> tuple[int, str]:
        for process in processes:
            process.join(WAIT_S)
            if process.is_alive():
                process.kill()
                return 0, "it hangs"
        return processes[0].exitcode, self.log(run).read_text()

    def log(self, run: Path) -> Path:
        return self.folder / f"{run.name}.log"

    def outcome(self, code: int, said: str, run: Path, *more: str, ranks: int = 1) -> str:
        """Judges how an attacked run ended, and what becomes of the same command."""
        if code == 0:
            return "it looks like success" if said != "it hangs" else said
        lines = [line for line in said.splitlines() if line.startswith("mmrl: ")]
        named = len(lines) == 1 and "Traceback" not in said
        return ("named in one line; " if named else f"not in one line ({lines or said[-300:]}); ") + self.goes_on(
            run, *more, ranks=ranks
        )

    def goes_on(self, run: Path, *more: str, ranks: int = 1) -> str:
        whole = self.whole(*more)
        code, said = self.run(command, run, *more, ranks=ranks)
        if code != 0:
            return f"the same command ends with {code}: {said[-300:]}"
        return "the same command goes on, " + ("equal" if alike(run, whole) else "otherwise")


def alike(run: Path, whole: Path) -> bool:
    """Whether two runs have equal weights and metrics."""
    return state_of(run) == state_of(whole)


# --- disks and directories ---


@contextmanager
def disk(folder: Path) -> Iterator[Path]:
    """A small disk of its own."""
    place = folder / "disk"
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "none", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def may_mount(folder: Path) -> bool:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    try:
        with disk(folder):
            return True
    except subprocess.CalledProcessError:
        return False


def full_at(around: Surroundings, pattern: str, *more: str) -> str:
    around.whole(*more)
    with disk(around.folder) as place:
        run = place / "run"
        code, said = around.run(hostile.on_full_disk, run, *more, before=(f"{place}/", pattern))
        if not (place / hostile.BALLAST).exists():
            return "the file was not written"
        (place / hostile.BALLAST).unlink()
        return around.outcome(code, said, run, *more)


def going_on(around: Surroundings, target: Callable[..., None], run: Path, rows: int = 3, ranks: int = 1) -> list:
    """Returns the processes of a run that has made some steps."""
    processes, end = around.start(target, run, *LONG, ranks=ranks), time.monotonic() + WAIT_S
    while not (run / "metrics.jsonl").exists() or len(metrics(run)) < rows:
        if time.monotonic() > end or not processes[0].is_alive():
            raise TimeoutError(around.log(run).read_text()[-300:])
        time.sleep(0.01)
    return processes


def renamed(around: Surroundings) -> str:
    run = around.new()
    around.whole(*LONG)
    processes = going_on(around, command, run)
    aside = run.with_name(f"{run.name}-renamed")
    run.rename(aside)
    code, said = around.ended(processes, run)
    shutil.rmtree(run, ignore_errors=True)
    aside.rename(run)
    return around.outcome(code, said, run, *LONG)


def removed(around: Surroundings) -> str:
    run = around.new()
    around.whole(*LONG)
    processes = going_on(around, command, run)
    shutil.rmtree(run, ignore_errors=True)
    code, said = around.ended(processes, run)
    shutil.rmtree(run, ignore_errors=True)
    return around.outcome(code, said, run, *LONG)


def read_only(around: Surroundings) -> str:
    run = around.new()
    around.whole(*LONG)
    processes = going_on(around, hostile.as_usual_user, run)
    folders = [run, *(path for path in run.rglob("*") if path.is_dir() and not path.name.endswith(".pending"))]
    for folder in folders:
        folder.chmod(0o555)
    code, said = around.ended(processes, run)
    for folder in folders:
        if folder.exists():
            folder.chmod(0o755)
    return around.outcome(code, said, run, *LONG)


# --- other users, clocks, templates ---


def of_another_user(around: Surroundings, mode: int, *parts: str) -> str:
    """A run that was cut off, whose parts belong to somebody else."""
    run = around.new()
    around.whole()
    if (code := around.run(command, run, "steps=2")[0]) != 0:
        return f"{code}"
    shutil.rmtree(run / "final")
    owned = [path for part in parts for path in run.glob(part)]
    before = [path.stat() for path in owned]
    for path in owned:
        os.chown(path, 12345, 12345)
        path.chmod(mode)
    code, said = around.run(hostile.as_usual_user, run)
    for path, facts in zip(owned, before, strict=True):
        if path.exists():
            os.chown(path, facts.st_uid, facts.st_gid)
            path.chmod(facts.st_mode & 0o7777)
    return around.outcome(code, said, run)


def clock(around: Surroundings, seconds: float) -> str:
    run = around.new()
    code, said = around.run(hostile.with_jumping_clock, run, before=(seconds,))
    durations = [value for row in metrics(run) for key, value in row.items() if key.startswith(("time/", "throughput"))]
    if code != 0 or min(durations) < 0:
        return f"ended with {code}, durations from {min(durations)}: {said[-200:]}"
    return "nothing happens" if alike(run, around.whole()) else "otherwise"


def template(around: Surroundings, text: str) -> str:
    """A model of somebody else, whose chat template loops."""
    model = around.folder / "model"
    shutil.rmtree(model, ignore_errors=True)
    shutil.copytree(model_folder(), model)
    for path in model.glob("chat_template*"):
        path.unlink()
    (model / "chat_template.jinja").write_text(text)
    began = time.monotonic()
    code, said = around.run(command, around.new(), "model.build=null", f"model.path={model}")
    if time.monotonic() - began > 120:
        return "it took more than two minutes"
    lines = [line for line in said.splitlines() if line.startswith("mmrl: ")]
    return "named in one line" if code == 2 and len(lines) == 1 and "chat template" in lines[0] else said[-300:]


# --- kills that are aimed ---


def rank_killed(around: Surroundings, rank: int) -> str:
    run = around.new()
    processes = going_on(around, command, run, ranks=2)
    os.kill(processes[rank].pid, signal.SIGKILL)
    code, said = around.ended([processes[1 - rank]], run)
    (line,) = errors_told(said) or [""]
    named = code == 2 and f"rank {rank} (process {processes[rank].pid} on" in line and "Traceback" not in said
    again, _ = around.run(command, run, *LONG, ranks=2)
    whole = around.new()
    around.run(command, whole, *LONG, ranks=2)
    equal = again == 0 and alike(run, whole)
    return f"{'named by the other' if named else said[-300:]}; the same command {'goes on, equal' if equal else again}"


def killed_in_evaluation(around: Surroundings, count: int) -> str:
    run = around.new()
    code, _ = around.run(hostile.killed_in_evaluation, run, "evaluation.micro_batch=1", before=(count, f"{run}.marker"))
    return f"{code}; {around.goes_on(run, 'evaluation.micro_batch=1')}"


def killed_in_partial_rollouts(around: Surroundings, count: int) -> str:
    run, whole, marker = around.new(), around.new(), Path(f"{around.folder}/{count}.marker")
    codes = []
    for one in (run, run, whole):
        (process,) = start(hostile.partial_rollouts_killed, count, str(marker), str(one), log=around.log(one))
        process.join(WAIT_S)
        codes.append(process.exitcode)
    return f"{codes[0]}; the same goes on, {'equal' if codes[1:] == [0, 0] and alike(run, whole) else codes}"


# --- a reward in the trainer ---


def changed(around: Surroundings, what: list[str]) -> str:
    """A reward that changes what the whole process has in common, while a run trains."""
    options = [f"task.rewards=[{{name: '{OWN}:changing', options: {{what: {kinds}}}}}]" for kinds in (what, [])]
    run = around.new()
    code, said = around.run(command, run, options[0])
    if code != 0:
        return f"ended with {code}: {said[-300:]}"
    return "the same weights" if alike(run, around.whole(options[1])) else "other weights"


def reward_ends(around: Surroundings, what: str) -> str:
    """A reward that ends the process; the same command again has another one, which does not."""
    run = around.new()
    option = "task.rewards=[{{name: '{}:ending', options: {{what: '{}', marker: '{}'}}}}]"
    marker = around.folder / f"{what}.marker"
    code, _ = around.run(command, run, option.format(OWN, what, marker))
    time.sleep(1.0)  # a watchdog speaks after the end
    lines = [line for line in around.log(run).read_text().splitlines() if line.startswith("mmrl: ")]
    again, more = around.run(command, run, option.format(OWN, what, marker))
    if again != 0:
        return f"{code}, {lines}; the same command ends with {again}: {more[-300:]}"
    equal = alike(run, around.whole(option.format(OWN, "", around.folder / "no.marker")))
    return f"{code}, {len(lines)} lines; the same command goes on, {'equal' if equal else 'otherwise'}"


LOOPS = "{%- for i in range(99999) -%}{%- for k in range(99999) -%}{%- endfor -%}{%- endfor -%}"


def cases(around: Surroundings, part: bool) -> Iterator[tuple[str, str, Callable[[], str], tuple[str, ...]]]:
    """Rows of the table: what is attacked, the case, the attack, and the outcomes that are right."""
    if may_mount(around.folder):
        for name in ["metrics, behind a checkpoint", "the final weights"] if part else FULL:
            for background in ("true",) if part or "checkpoint" not in name else ("true", "false"):
                more = (f"checkpoint.background={background}",)
                yield (
                    f"a full disk at {name}",
                    background,
                    lambda name=name, more=more: full_at(around, FULL[name], *more),
                    (GOES_ON,),
                )
    yield "a run directory renamed", "renamed", lambda: renamed(around), (GOES_ON,)
    if not part:
        yield "a run directory removed", "removed", lambda: removed(around), (GOES_ON,)
    yield "a run directory read-only", "read-only", lambda: read_only(around), (GOES_ON,)
    if os.geteuid() == 0:
        owned = {"checkpoints": "checkpoints/*", "files of a checkpoint": "checkpoints/*/*", "metrics": "metrics.jsonl"}
        for name, pattern in list(owned.items())[: 1 if part else None]:
            attack = lambda pattern=pattern: of_another_user(around, 0o700, pattern)  # noqa: E731
            yield f"another user's {name}, unreadable", name, attack, (GOES_ON,)
    for seconds in (-3600.0, 86400.0)[: 1 if part else 2]:
        yield "a clock that jumps", f"{seconds}", lambda s=seconds: clock(around, s), ("nothing happens",)
    yield "a chat template that loops", "nested", lambda: template(around, LOOPS), ("named in one line",)
    for rank in (1,) if part else (0, 1):
        wanted = "named by the other; the same command goes on, equal"
        yield "one of two ranks killed", f"{rank}", lambda r=rank: rank_killed(around, r), (wanted,)
    for count in (3,) if part else (1, 3, 4, 7):
        wanted = "-9; the same command goes on, equal"
        yield "kill -9 in an evaluation", f"{count}", lambda c=count: killed_in_evaluation(around, c), (wanted,)
    for count in (2,) if part else (1, 2, 4):
        wanted = "-9; the same goes on, equal"
        attack = lambda c=count: killed_in_partial_rollouts(around, c)  # noqa: E731
        yield "kill -9 in partial rollouts", f"{count}", attack, (wanted,)

    for kinds in [list(hostile.CHANGES)] if part else [[name] for name in hostile.CHANGES]:
        attack = lambda kinds=kinds: changed(around, kinds)  # noqa: E731
        yield "a reward that changes its process", ", ".join(kinds), attack, ("the same weights",)
    codes = {"an alarm": -14, "a segmentation fault": -11, "exit(0) of C": -45, "_exit(0) of C": 0}
    for name, code in codes.items():
        if not part or code == 0:
            wanted = f"{code}, 1 lines; the same command goes on, equal"
            yield "a reward that ends its process", name, lambda name=name: reward_ends(around, name), (wanted,)


def main(arguments: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--part", action="store_true", help="try one case of each kind")
    options.add_argument("--only", default="", help="try the cases whose name matches this pattern")
    chosen, table = options.parse_args(arguments), Table("surroundings")
    with tempfile.TemporaryDirectory(prefix="mmrl-attack-") as folder:
        for row, name, attack, wanted in cases(Surroundings(Path(folder)), chosen.part):
            if re.search(chosen.only, row):
                table.case(row, name, attack, *wanted)
    return table.finish()


if __name__ == "__main__":
    sys.exit(main())
