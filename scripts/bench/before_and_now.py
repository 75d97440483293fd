"""Start-up of `mmrl train`, generation of long responses, PushCube: an earlier commit and this one, in turns.

    .venv/bin/python scripts/bench/before_and_now.py [--commit a4b3f00] [--rounds 3] [--parts start,generation,steps]

The earlier commit's files are taken out of git into a temporary folder and found before those that are installed; the
libraries are the same. Every measurement is processor time of a process of its own, with one thread.

start       from the beginning of the process to the beginning of the first training step, of `mmrl train` with the
            image quickstart and the quickstart of visual questions, from a base that each commit has made for itself
            (which has also left behind what later starts find); without evaluation. The image quickstart of a4b3f00
            used a network of its own, which is image_digits_perceptron now, and no diffusers: both are measured
generation  4 prompts of 40 tokens x 4 responses of --length tokens by a Qwen2.5-VL of width 256 and four layers, whose
            eight heads share four keys and values (`full`); and the same with an end token that is likely enough for
            responses of all lengths (`ending`). Both commits draw the same tokens
steps       a training step of one recipe of each kind (STEPS), from a base that the present commit made, by rewards
            drawn by chance, so that each has something to learn: the mean of eight steps after two. --print-config of
            these recipes too, a process each
pushcube    1,000 environment steps of `mmrl train manipulation_maniskill_pushcube.yaml`, each commit with its
            own recipe, in one process: rollouts, updates and logs of three training steps after the first one
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

EXIT = os._exit  # kept here, since a training process replaces os._exit to notice user code that calls it
ROOT = Path(__file__).resolve().parents[2]
QUICKSTARTS = {  # a recipe and its base
    "image_digits_flow": "image_digits_base",
    "visual_qa_digits": "visual_qa_digits_warm_start",
}
LIKE = {"image_digits_flow": ("image_digits_perceptron", "image_digits_perceptron_base")}  # what the former was before
STEPS = {  # recipes and their bases
    "visual_qa_digits": "visual_qa_digits_warm_start",
    "image_digits_perceptron": "image_digits_perceptron_base",
    "text_sums_masked": "text_sums_masked_warm_start",
    "manipulation_tabletop": "manipulation_tabletop_warm_start",
}
WARM_UP, COUNTED = 2, 8  # steps
PROMPTS, GROUP, PROMPT_LENGTH = 4, 4, 40
ENDS = {"full": 0, "ending": 2}  # ids that end a response, of about 350; 0: none


def main() -> None:
    options = arguments()
    if options.child is not None:
        children: dict[str, Callable[..., None]] = {"start": start, "generation": generation, "model": model}
        children |= {"pushcube": pushcube, "steps": steps, "print": print_config}
        return children[options.child[0]](*options.child[1:])
    with tempfile.TemporaryDirectory(prefix="mmrl-before-") as folder:
        trees = {"before": Path(folder) / "tree", "now": ROOT}
        take_out(options.commit, trees["before"])
        cases = prepare(options, trees, Path(folder))
        found: dict[str, dict[str, list[float]]] = {name: {tree: [] for tree in trees} for name in cases}
        for _ in range(options.rounds):
            for name, child in cases.items():
                for tree, place in trees.items():
                    out = Path(folder) / "seconds.json"
                    words = [word.replace("TREE", tree) for word in child]
                    run([sys.executable, __file__, "--child", *words, str(out)], place)
                    found[name][tree].append(json.loads(out.read_text()))
                    print(f"{name}, {tree}: {found[name][tree][-1]:.3f} s", file=sys.stderr, flush=True)
    print(table(found))
    return None


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="An earlier commit beside this one.")
    parser.add_argument("--commit", default="a4b3f00")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", default="start,generation")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a response")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args(given)


def take_out(commit: str, folder: Path) -> None:
    folder.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive, check=True)
    for name in ("tasks", "sims", "configs"):  # which are imported as mmrl.tasks and so on
        (folder / "mmrl" / name).symlink_to(folder / name)
    installed = folder / "mmrl-0.dist-info"  # a run asks for its own version
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: mmrl\nVersion: 0\n")


def prepare(options: argparse.Namespace, trees: dict[str, Path], folder: Path) -> dict[str, list[str]]:
    """What is measured, by name: the words of a child, in which TREE stands for before or now."""
    cases: dict[str, list[str]] = {}
    if "start" in options.parts:
        for name, base in QUICKSTARTS.items():
            now = {"": (name, base)} | ({f" ({LIKE[name][0]} now)": LIKE[name]} if name in LIKE else {})
            make_base(trees["before"], base, folder / f"before-{base}")
            for words, (own, own_base) in now.items():
                make_base(trees["now"], own_base, folder / f"now-{own_base}")
                recipes = {"before": f"{name} {folder}/before-{base}", "now": f"{own} {folder}/now-{own_base}"}
                cases[f"start of {name}{words}"] = ["start", "TREE", json.dumps(recipes)]
    if "generation" in options.parts:
        run([sys.executable, __file__, "--child", "model", f"{folder}/model"], ROOT)
        for ends in ENDS:
            cases[f"{options.length} tokens, {ends}"] = [
                "generation",
                "TREE",
                f"{folder}/model",
                ends,
                str(options.length),
            ]
    if "steps" in options.parts:
        for name, base in STEPS.items():
            make_base(trees["now"], base, folder / f"steps-{base}")
            cases[f"a step of {name}"] = ["steps", name, f"{folder}/steps-{base}/final"]
            cases[f"--print-config of {name}"] = ["print", name]
    if "pushcube" in options.parts:
        cases["PushCube, 1,000 environment steps"] = ["pushcube"]
    return cases


def make_base(place: Path, base: str, folder: Path) -> None:
    few = ["steps=1", "evaluation.prompts=4", f"run_dir={folder}"]
    run([sys.executable, "-m", "mmrl", "train", str(recipe(place, base)), *few], place)


def recipe(place: Path, name: str) -> Path:
    """Returns the recipe in a tree, in whose folder it lies there."""
    return next((place / "configs").rglob(f"{name}.yaml"))


def run(command: list[str], place: Path) -> None:
    """With the packages that lie in `place`, before those that are installed."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
    found = {} if place == ROOT else {"PYTHONPATH": str(place)}
    environment = {**os.environ, **one, **found, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}")


def table(found: dict[str, dict[str, list[float]]]) -> str:
    lines = ["| | before, s | now, s | times as fast |", "| --- | --- | --- | --- |"]
    for name, arms in found.items():
        ratios = [before / now for before, now in zip(arms["before"], arms["now"], strict=True)]
        cells = [spread(arms["before"]), spread(arms["now"]), spread(ratios)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} .. {max(values):.2f})"


# --- the children, by the code of either commit ---


def start(tree: str, recipes: str, out: str) -> None:
    name, folder = json.loads(recipes)[tree].split(" ", 1)
    config, base = str(recipe(Path.cwd(), name)), f"{folder}/final"

    def begin(_: Any) -> None:
        Path(out).write_text(json.dumps(time.process_time()))
        EXIT(0)

    class Ending(SourceFileLoader):
        """The trainer as it is, whose first step ends the process. It is loaded when the command line asks for it."""

        def exec_module(self, module: ModuleType) -> None:
            super().exec_module(module)
            vars(module)["Trainer"].train = begin

    class Finder(MetaPathFinder):
        def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
            spec = PathFinder.find_spec(name, path, target) if name == "mmrl.trainer" else None
            if spec is not None:
                spec.loader = Ending(name, str(spec.origin))
            return spec

    sys.meta_path.insert(0, Finder())
    run_dir = f"run_dir={Path(out).parent / 'run'}"
    mmrl(["train", config, "model.warm_start=null", f"model.path={base}", run_dir, "evaluation.before=false"])
    raise AssertionError("unreachable: the first step has ended the process")


def mmrl(arguments: list[str]) -> None:
    """Runs the command line in this process, wherever a commit has it."""
    sys.argv = ["mmrl", *arguments]
    runpy.run_module("mmrl", run_name="__main__")


def steps(name: str, base: str, out: str) -> None:
    points: list[float] = []

    def log(_: Any) -> None:
        points.append(time.process_time())
        if len(points) == WARM_UP + COUNTED:
            Path(out).write_text(json.dumps((points[-1] - points[WARM_UP - 1]) / COUNTED))
            EXIT(0)

    at_each_step(log)
    run_dir = Path(out).parent / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    begin = ["model.warm_start=null", f"model.path={base}", f"run_dir={run_dir}", "threads=1"]
    least = ["task.rewards=[{name: random}]", "evaluation.before=false", "evaluation.every=0", "log.samples_every=0"]
    mmrl(["train", str(recipe(Path.cwd(), name)), *begin, *least, "checkpoint.every=0"])
    raise AssertionError("unreachable: the last step has ended the process")


def print_config(name: str, out: str) -> None:
    try:
        mmrl(["train", str(recipe(Path.cwd(), name)), "--print-config"])
    except SystemExit:
        Path(out).write_text(json.dumps(time.process_time()))


def at_each_step(act: Callable[[Any], None]) -> None:
    """Has `act` called with the rollouts of each training step after it was logged."""
    from mmrl.trainer import Trainer

    logged = Trainer.log

    def log(trainer: Any, rollouts: Any, metrics: Any) -> None:
        logged(trainer, rollouts, metrics)
        act(rollouts)

    Trainer.log = log  # type: ignore[method-assign, assignment]


def pushcube(out: str) -> None:
    import torch

    torch.set_num_threads(1)
    points: list[tuple[int, float]] = []  # environment steps of each training step, and when it was over

    def log(rollouts: Any) -> None:
        points.append((sum(sample.episode.length for sample in rollouts.samples), time.process_time()))
        if len(points) == 4:
            seconds = points[-1][1] - points[0][1]
            Path(out).write_text(json.dumps(1000 * seconds / sum(count for count, _ in points[1:])))
            EXIT(0)

    at_each_step(log)
    alone = ["task.workers=0", "task.turns=1", "threads=1", f"run_dir={Path(out).parent / 'run'}"]
    shutil.rmtree(Path(out).parent / "run", ignore_errors=True)
    more = ["evaluation.before=false", "checkpoint.every=0"]
    mmrl(["train", str(recipe(Path.cwd(), "manipulation_maniskill_pushcube")), *alone, *more])
    raise AssertionError("unreachable: the fourth step has ended the process")


def model(folder: str) -> None:
    from mmrl.policies.vlm.tiny_qwen import Sizes, write
    from mmrl.tasks.visual_qa.tiny.model import build_tokenizer

    write(folder, build_tokenizer(), Sizes(width=256, layers=4), seed=0)


def generation(tree: str, folder: str, ends: str, length: str, out: str) -> None:
    import torch
    from transformers import AutoModelForImageTextToText

    from mmrl.generation.sampling import Sampling
    from mmrl.generation.transformers import generate_groups

    torch.set_num_threads(1)
    network = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    ids = torch.randint(8, 200, (PROMPTS, PROMPT_LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    for row in range(PROMPTS):
        mask[row, : 3 * row] = 0  # prompts of several lengths
    rows = torch.arange(PROMPTS).repeat_interleave(GROUP)
    before: Any = {"group_size": GROUP, "max_new_tokens": int(length)}  # as each tree has it
    now: Any = {"prompts": torch.arange(PROMPTS), "begun": [ids[0, :0]] * PROMPTS, "rows": rows}
    options = before if tree == "before" else {**now, "limits": [int(length)] * len(rows)}
    began = time.process_time()
    generate_groups(
        network.eval(),
        {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": torch.zeros_like(ids)},
        **options,
        sampling=Sampling(),
        seeds=list(range(len(rows))),
        eos=tuple(range(200, 200 + ENDS[ends])) or (-1,),
    )
    Path(out).write_text(json.dumps(time.process_time() - began))


if __name__ == "__main__":
    main()
