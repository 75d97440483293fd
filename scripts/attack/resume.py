"""Attacks runs and their checkpoints: the same command twice, kills at random moments, flipped bits, damaged files, two
runs in one directory, restarts by torchrun, resuming with other ranks and ZeRO stages. Prints a table of results.

    python scripts/attack/resume.py --kills 20 --flips 200 --seconds 1800
    python scripts/attack/resume.py --kills 100 --only kills --folder runs/campaign     # a second call continues

Everything runs on this machine, in a temporary directory or in --folder, with the tiny models of the tests. Exits with
1 if a run ended in another way, or with other weights, than a run that was not attacked.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from mmrl.checkpoints import files  # noqa: E402
from scripts.attack.combined_jobs import JOBS, Job  # noqa: E402
from tests.whole_runs.parts import IMAGES, ROBOTS, TINY, command, distance, final, metrics, start, timeless  # noqa: E402
from tests.whole_runs.test_launchers import TORCHRUN, finished, launch  # noqa: E402

KINDS = {
    "visual QA": Job(TINY),
    "images": Job(IMAGES),
    "robots": Job(ROBOTS, ("task.train_size=6",)),  # near the goal, so that there is something to learn
} | JOBS
RUN = ["steps=6", "checkpoint.every=1", "optim.ema=0.5", "evaluation.every=2", "checkpoint.best=true"]
OF_THE_RUN = {"run.json", "manifest.json", "tokenizer.json"}  # they name the directory, or what was tokenised last
DAMAGES: dict[str, Callable[[Path, int], None]] = {
    "deleted": lambda path, size: path.unlink(),
    "emptied": lambda path, size: path.write_bytes(b"") and None,
    "cut in half": lambda path, size: os.truncate(path, size // 2),
    "zeros": lambda path, size: path.write_bytes(bytes(size)) and None,
}


class Attack:
    """What all attacks share: a place, chance, an end, and the runs without an attack. In a folder that was used
    before it goes on: what was noted there counts."""

    def __init__(self, folder: Path, seed: int, seconds: float) -> None:
        self.folder, self.end = folder, time.monotonic() + seconds
        self.rows: dict[str, Counter[str]] = {}
        self._ledger, self._made = folder / "tried.jsonl", 0
        noted = [json.loads(line) for line in self._ledger.open()] if self._ledger.exists() else []
        for row in noted:
            self.rows.setdefault(row["attack"], Counter())[row["outcome"]] += 1
        self.failed = any(not row["good"] for row in noted)
        self.chance = random.Random(f"{seed} {len(noted)}")

    def over(self) -> bool:
        return time.monotonic() > self.end

    def note(self, attack: str, outcome: str, good: bool = True) -> None:
        self.rows.setdefault(attack, Counter())[outcome] += 1
        with self._ledger.open("a") as file:
            file.write(json.dumps({"attack": attack, "outcome": outcome, "good": good}) + "\n")

    def judge(self, attack: str, good: bool, outcome: str, otherwise: str) -> None:
        self.note(attack, outcome if good else otherwise, good)
        self.failed |= not good

    def tried(self, attack: str, outcome: str) -> int:
        return self.rows.get(attack, Counter())[outcome]

    def new(self) -> Path:
        """Returns a run directory that is not there, nor was when the campaign was stopped."""
        self._made += 1
        run = self.folder / f"run-{self._made}"
        return self.new() if run.exists() or run.with_suffix(".log").exists() else run

    def start(self, kind: str, run: Path, *more: str, ranks: int | None = None) -> list:
        job = KINDS[kind]
        settings = ["train", str(job.base), *RUN, *job.options, *job.files(run), f"run_dir={run}", *more]
        return start(command, *settings, log=run.with_suffix(".log"), ranks=ranks or job.ranks)

    def finish(self, kind: str, run: Path, *more: str, ranks: int | None = None) -> list[int]:
        processes = self.start(kind, run, *more, ranks=ranks)
        for process in processes:
            process.join(300)
        return [process.exitcode for process in processes]

    @staticmethod
    def ended(process) -> int | None:  # type: ignore[no-untyped-def]
        """Returns the exit code of a process that ends by itself, or with the rank that was killed beside it."""
        process.join(120)
        if process.is_alive():
            process.kill()
            return None
        return process.exitcode

    def whole(self, kind: str) -> tuple[Path, float]:
        """A run to its end, and the seconds it took."""
        run, took = self.folder / f"whole-{kind}", self.folder / f"whole-{kind}.seconds"
        if not took.exists():
            shutil.rmtree(run, ignore_errors=True)  # of a campaign that was stopped meanwhile
            started = time.monotonic()
            assert not any(self.finish(kind, run)), run.with_suffix(".log").read_text()
            took.write_text(str(time.monotonic() - started))
        return run, float(took.read_text())

    def compare(self, attack: str, kind: str, run: Path) -> None:
        whole, tolerance = self.whole(kind)[0], KINDS[kind].tolerance
        if tolerance:
            away = distance(final(run), final(whole))
            self.judge(
                attack, away <= tolerance, f"runs within {tolerance:g} of one without an attack", f"{away}: {run}"
            )
            return
        same = state_of(run) == state_of(whole)
        self.judge(attack, same, "runs equal to one without an attack", f"different: {run}")


def state_of(run: Path) -> tuple[dict[str, str], list[dict]]:
    """Checksums of the weights a run leaves, and its metrics but for times."""
    kept = [
        p for name in ("final", "best") for p in (run / name).rglob("*") if p.is_file() and p.name not in OF_THE_RUN
    ]
    sums = {str(p.relative_to(run)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(kept)}
    return sums, [{k: v for k, v in row.items() if k != "time"} for row in timeless(metrics(run))]


def kills(attack: Attack, count: int, kinds: Sequence[str]) -> None:
    """SIGKILL of one rank at a uniformly random moment, the same command again, until the run has ended."""
    for kind in kinds:
        left, (_, seconds) = count - attack.tried(f"kill -9, {kind}", "kills"), attack.whole(kind)
        while left > 0 and not attack.over():
            run, ended = attack.new(), False
            while not ended:
                began, processes = time.monotonic(), attack.start(kind, run)
                victim = attack.chance.choice(processes)
                victim.join(attack.chance.uniform(0.0, seconds) if left > 0 else 300)
                ended = victim.exitcode is not None
                if not ended:
                    os.kill(victim.pid, signal.SIGKILL)
                    left -= 1
                    attack.note(f"kill -9, {kind}", "kills")
                codes = [attack.ended(process) for process in processes]
                if None in codes or (ended and any(codes)):
                    why = "a rank hangs" if None in codes else "refused"
                    attack.judge(f"kill -9, {kind}", False, "", f"{why}: {run.with_suffix('.log')}")
                    break
                seconds = min(seconds, time.monotonic() - began) if ended else seconds
            attack.compare(f"kill -9, {kind}", kind, run)
            if not attack.failed:
                shutil.rmtree(run)


def twice(attack: Attack, kinds: Sequence[str]) -> None:
    """The same command again, in another folder."""
    for kind in kinds:
        if attack.over():
            return
        run = attack.new()
        attack.finish(kind, run)
        attack.compare(f"the same command twice, {kind}", kind, run)


def flips(attack: Attack, count: int) -> None:
    """One bit turned over anywhere in any file of a checkpoint."""
    checkpoint = attack.new()
    shutil.copytree(newest(attack.whole("visual QA")[0]), checkpoint)
    found = sorted(p for p in checkpoint.rglob("*") if p.is_file())
    for number in range(count):
        path = found[number % len(found)]
        place = attack.chance.randrange(path.stat().st_size * 8)
        flip(path, place)
        seen = files.find_damage(checkpoint) is not None
        attack.judge("bits flipped in a checkpoint", seen, "noticed", f"not noticed: {path.name}, bit {place}")
        flip(path, place)


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place // 8)
        byte = file.read(1)[0]
        file.seek(place // 8)
        file.write(bytes([byte ^ 1 << place % 8]))


def newest(run: Path) -> Path:
    return files.list_finished(run / "checkpoints")[-1]


def broken(run: Path) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Ways to damage the newest checkpoint of a run, and what lies beside it."""
    names = [p.relative_to(newest(run)) for p in sorted(newest(run).rglob("*")) if p.is_file()]
    for name in names:
        for way, damage in DAMAGES.items():
            path = name
            yield (
                f"{name} {way}",
                lambda at, path=path, damage=damage: damage(newest(at) / path, (newest(at) / path).stat().st_size),
            )
    yield "checkpoint emptied", lambda at: [p.unlink() for p in newest(at).rglob("*") if p.is_file()] and None
    yield "stray folders", lambda at: [(at / "checkpoints" / n).mkdir() for n in ("step-backup", "x.pending")] and None
    for text in (b"garbage\n", bytes(64), b"\xff\xfe\n", b"{}\n"):
        yield f"metrics.jsonl with {text[:9]!r}", lambda at, text=text: spoil(at / "metrics.jsonl", text)
    for name in ("metrics.jsonl", "config.yaml", "versions.json", "run.lock"):
        yield f"{name} deleted", lambda at, name=name: (at / name).unlink()


def spoil(path: Path, text: bytes) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:1], text, *lines[1:]]))


def damages(attack: Attack) -> None:
    """A run that was cut off before its last step goes on although something is damaged, and ends as it should."""
    whole, _ = attack.whole("visual QA")
    half = attack.new()
    assert attack.finish("visual QA", half, "steps=4") == [0]
    shutil.rmtree(half / "final")
    for name, damage in broken(half):
        if attack.over():
            return
        run = attack.new()
        shutil.copytree(half, run)
        damage(run)
        ended = attack.finish("visual QA", run) == [0]
        same = ended and state_of(run)[0] == state_of(whole)[0]
        attack.judge("damaged files", same, "went on and ended equal", f"failed: {name}, {run}")


def two_runs(attack: Attack) -> None:
    """Two started at once in one directory, and a third while one is going on."""
    run = attack.new()
    at_once = [attack.start("visual QA", run, "steps=60")[0] for _ in range(2)]
    while not (run / "metrics.jsonl").exists() or not metrics(run):
        time.sleep(0.05)
    late = attack.finish("visual QA", run, "steps=60")
    for process in at_once:
        process.join(300)
    codes = sorted([p.exitcode for p in at_once]) + late
    steps = [row["step"] for row in metrics(run) if "loss" in row]
    fine = codes == [0, 2, 2] and steps == list(range(1, 61))
    attack.judge("three runs in one directory", fine, "one trained, two refused", f"wrong: {codes}, {run}")


def restarts(attack: Attack) -> None:
    """A rank under torchrun is killed, and torchrun starts all again with the same arguments."""
    run = attack.new()
    dies = ["task.type=tests.whole_runs.parts:DiesOnce", "checkpoint.every=1", "steps=4"]
    dies.append("checkpoint.background=false")  # a checkpoint is there before the rank dies
    arguments = [*TORCHRUN, "--max-restarts", "1"]
    code, said = finished(launch(arguments, run, *dies, MMRL_TESTS_DIED=str(run.with_suffix(".died"))))
    steps = [row["step"] for row in metrics(run) if "loss" in row]
    fine = code == 0 and steps == [1, 2, 3, 4] and "resumed from" in said
    attack.judge("torchrun --max-restarts", fine, "went on to the end", f"wrong: exit {code}, {run}")


def shapes(attack: Attack) -> None:
    """Every two steps with another number of ranks, and another ZeRO stage."""
    whole, _ = attack.whole("visual QA")
    for plan in (
        [(2, 0), (1, 0), (2, 0)],
        [(2, 2), (1, 3), (2, 3)],
        [(2, 3), (2, 2), (1, 1)],
        [(1, 1), (2, 0), (2, 3)],
    ):
        if attack.over():
            return
        run = attack.new()
        codes = [
            attack.finish("visual QA", run, f"steps={2 * n}", f"engine.zero_stage={stage}", ranks=ranks)
            for n, (ranks, stage) in enumerate(plan, 1)
        ]
        fine = not any(sum(codes, [])) and distance(final(run), final(whole)) < 1e-5
        named = " -> ".join(f"{ranks} ranks ZeRO {stage}" for ranks, stage in plan)
        attack.judge("other ranks and ZeRO stages", fine, "weights within 1e-5", f"wrong: {named}, {run}")


def table(rows: dict[str, Counter[str]]) -> str:
    lines = ["| attack | tries | outcome |", "| --- | --- | --- |"]
    for name, outcomes in rows.items():
        told = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
        lines.append(f"| {name} | {max(outcomes.values())} | {told} |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=20, help="number of kills of each kind of job")
    options.add_argument(
        "--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="kinds of job to kill or to repeat"
    )
    options.add_argument("--flips", type=int, default=200)
    options.add_argument("--seconds", type=float, default=1800.0, help="after this time nothing new is started")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument(
        "--folder", type=Path, help="folder that keeps the results, so that a second call continues; default: temporary"
    )
    known = ["twice", "kills", "flips", "damages", "two_runs", "restarts", "shapes"]
    options.add_argument("--only", nargs="+", choices=known, default=known)
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="mmrl-attack-"))
    folder.mkdir(parents=True, exist_ok=True)
    attack = Attack(folder, options.seed, options.seconds)
    attacks = {
        "twice": lambda: twice(attack, options.kinds),
        "kills": lambda: kills(attack, options.kills, options.kinds),
        "flips": lambda: flips(attack, options.flips),
        "damages": lambda: damages(attack),
        "two_runs": lambda: two_runs(attack),
        "restarts": lambda: restarts(attack),
        "shapes": lambda: shapes(attack),
    }
    for name in options.only:
        if not attack.over():
            attacks[name]()
            print(table(attack.rows), flush=True)
    if not attack.failed and options.folder is None:
        shutil.rmtree(folder)
    return int(attack.failed)


if __name__ == "__main__":
    sys.exit(main())
