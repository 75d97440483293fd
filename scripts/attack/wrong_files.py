"""Files and folders with mistakes, and the jobs that open them.

Each function writes files below a folder and returns cases as in `wrong_inputs.py`.
"""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file
from wrong_inputs import TAKEN, Cases

from mmrl.tasks.image_generation.tiny import model as images
from mmrl.tasks.visual_qa.tiny import model as tiny_model

SHARED: dict[str, Any] = {
    "steps": 1,
    "threads": 1,
    "rollout": {"prompts": 2, "group_size": 2, "max_unscored_steps": 1},
    "optim": {"lr": 1e-3},
    "engine": {"micro_batch": 4},
    "evaluation": {"before": False, "every": 0, "prompts": 2},
    "checkpoint": {"every": 0, "best": False},
    "log": {"samples_every": 0},
}


def merged(*trees: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for tree in trees:
        for key, value in tree.items():
            inner = isinstance(value, dict) and isinstance(found.get(key), dict)
            found[key] = merged(found[key], value) if inner else value
    return found


def jobs(folder: Path) -> dict[str, dict[str, Any]]:
    """A small job of each kind, which trains a step in a second or two."""
    questions = {"type": "files", "train": f"{folder}/good.jsonl", "eval": f"{folder}/good.jsonl"}
    prompts = {"type": "prompts", "train": f"{folder}/prompts.txt", "heldout": 0.3}
    bright = {"name": "odd_parts:brightness"}
    dot = {"env": "odd_parts:Dot-v0", "image": "pixels", "state": "agent_pos", "instruction": "reach for the red cube"}
    dot["success"] = "terminated"  # as an episode of it ends
    own = {
        "visual_qa": {
            "model": {"build": "mmrl.tasks.visual_qa.tiny.model:build"},
            "task": {"type": "visual_qa", "data": questions, "rewards": [{"name": "odd_parts:one"}]},
            "rollout": {"max_response_length": 4},
        },
        "images": {
            "model": {"type": "diffusion", "build": "mmrl.tasks.image_generation.tiny.model:build_digits"},
            "task": {"type": "image_generation", "data": prompts, "rewards": [bright], "accuracy": bright},
            "denoising": {"steps": 2, "evaluation_steps": 2},
        },
        "robots": {
            "model": {
                "type": "vision_language_action",
                "build": "mmrl.tasks.manipulation.tiny_model:build_small",
            },
            "task": {"type": "manipulation", "simulator": "gymnasium", "options": dot, "tasks": ["default"], "rows": 4},
            "action": {"head": {"type": "token", "bins": 32}, "chunk": 2, "horizon": 6},
        },
    }
    return {name: merged(SHARED, tree) for name, tree in own.items()}


def make(folder: Path) -> dict[str, Path]:
    """The good files; the configuration of each job."""
    for name in ("empty", "broken"):
        (folder / name).mkdir()
    (folder / "broken" / "config.json").write_text("{")
    image().save(folder / "good.png")
    rows(folder / "good.jsonl", *[row(answer=str(i)) for i in range(4)])
    names = ("zero", "one", "two", "three", "four", "five", "six", "seven")
    (folder / "prompts.txt").write_text("".join(f"a handwritten {name}\n" for name in names))
    found = {}
    for name, tree in jobs(folder).items():
        found[name] = folder / f"{name}.yaml"
        found[name].write_text(yaml.safe_dump(tree | {"run_dir": f"{folder}/runs/{name}"}))
    return found


def image(width: int = 16, height: int = 16) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def row(**changed: Any) -> dict[str, Any]:
    return {"problem": "<image>What?", "answer": "1", "images": ["good.png"]} | changed


def rows(path: Path, *held: Any) -> Path:
    told = [one if isinstance(one, bytes) else json.dumps(one, ensure_ascii=False).encode() for one in held]
    path.write_bytes(b"\n".join(told) + b"\n")
    return path


# --- models ---


def models(folder: Path) -> None:
    """Folders of models that are not whole."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    whole = folder / "whole"
    tiny_model.build(whole)
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=1, num_key_value_heads=1)).save_pretrained(
        folder / "text"
    )
    tokenizer = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "text")
    images.build_digits(folder / "pipeline", seed=0)
    for name in ("half_pipeline", "cut_pipeline"):
        shutil.copytree(folder / "pipeline", folder / name)
    for file in (folder / "half_pipeline").rglob("*.safetensors"):
        file.unlink()
    for file in (folder / "cut_pipeline").rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1000])
    for name in ("no_weights", "no_tokenizer", "cut_weights", "other_weights", "nan_weights"):
        shutil.copytree(whole, folder / name)
    (folder / "no_weights" / "model.safetensors").unlink()
    for file in (folder / "no_tokenizer").glob("tokenizer*"):
        file.unlink()
    cut = folder / "cut_weights" / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1000])
    held = load_file(whole / "model.safetensors")
    save_file({"other": torch.zeros(3)}, folder / "other_weights" / "model.safetensors", {"format": "pt"})
    held = {name: torch.full_like(value, torch.nan) for name, value in held.items()}
    save_file(held, folder / "nan_weights" / "model.safetensors", {"format": "pt"})


# --- files of questions and prompts ---


def questions(folder: Path) -> Cases:
    good = row()
    image(500, 1).save(folder / "line.png")
    image(1, 1).save(folder / "point.png")
    image(600, 400).save(folder / "large.png")
    (folder / "torn.png").write_bytes((folder / "good.png").read_bytes()[:20])
    (folder / "words.png").write_text("no image")
    Image.new("I;16", (16, 16)).save(folder / "deep.png")
    text = json.dumps(good)
    bad = {
        "image that is not there": [good, row(images=["absent.png"])],
        "torn image": [good, row(images=["torn.png"])],
        "image of words": [good, row(images=["words.png"])],
        "no answer": [good, {"problem": "?", "images": []}],
        "empty question": [good, row(problem="")],
        "question of a number": [good, row(problem=3)],
        "two markers": [good, row(problem="<image><image>?")],
        "images of a number": [good, row(images=3)],
        "images of an object": [good, row(images={"a": 1})],
        "image beside `images`": [good, {"problem": "What?", "answer": "1", "image": "good.png"}],
        "other columns": [{"question": "?", "solution": "1"}] * 3,
        "latin-1": [good, '{"problem": "caf\xe9", "answer": "1"}'.encode("latin-1")],
        "UTF-16": [text.encode("utf-16")],
        "torn JSON": [good, b'{"problem": "?'],
        "an array": [b"[" + text.encode() + b"]"],
        "JSON of several lines": [json.dumps(good, indent=1).encode()],
        "nothing": [b""],
        "blank lines": [b"\n\n"],
        "huge number": [good, b'{"problem": "?", "answer": 1e999}'],
        "image too thin for the model": [good, row(images=["line.png"])],
    }
    fine = {
        "answer of an object": [row(answer={"a": 1})] * 2,
        "byte order mark": [b"\xef\xbb\xbf" + text.encode()] + [good],
        "answer of a number": [row(answer=3)] * 2,
        "answers of a list": [row(answer=["1", "2"])] * 2,
        "image of 1 x 1": [row(images=["point.png"])] * 2,
        "image of 16 bits": [row(images=["deep.png"])] * 2,
        "two images": [row(problem="<image><image>?", images=["good.png", "good.png"])] * 2,
        "no image": [{"problem": "What?", "answer": "1"}] * 2,
    }
    cases: Cases = []
    for number, (name, held) in enumerate((bad | fine).items()):
        path = rows(folder / f"questions-{number}.jsonl", *held)
        cases.append((name, f"task.data.train={path}", TAKEN if name in fine else path.name))
    named = {
        "text.csv": b"a,b\n",
        "text.txt": b"a\n",
        "broken.parquet": b"PAR1 no",
        "empty.parquet": b"",
        "x.jsonl.gz": b"",
    }
    for name, data in named.items():
        (folder / name).write_bytes(data)
        cases.append((f"file {name}", f"task.data.train={folder}/{name}", name))
    parquet.write_table(pa.table({"problem": ["?"], "solution": ["1"]}), folder / "columns.parquet")
    parquet.write_table(
        pa.table({"problem": pa.array([], pa.string()), "answer": pa.array([], pa.string())}), folder / "none.parquet"
    )
    cases += [(f"file {n}", f"task.data.train={folder}/{n}", n) for n in ("columns.parquet", "none.parquet")]
    cases.append(("folder as a file", f"task.data.train={folder}/empty", "empty"))
    cases.append(("held-out file of other columns", f"task.data.eval={folder}/columns.parquet", "columns.parquet"))
    return cases


def prompts(folder: Path) -> Cases:
    bad = {
        "nothing": b"",
        "blank line": b"a handwritten one\n\na handwritten two\n",
        "latin-1": b"caf\xe9\na handwritten one\n",
        "one prompt": b"a handwritten one\n",
        "zero bytes": b"\0\0\0\n" * 3,
    }
    cases: Cases = []
    for number, (name, data) in enumerate(bad.items()):
        path = folder / f"prompts-{number}.txt"
        path.write_bytes(data)
        cases.append(
            (name, f"task.data.train={path}", "data.heldout" if name in ("one prompt", "zero bytes") else path.name)
        )
    held = {
        "no prompt": [{"text": "x"}] * 3,
        "prompt of a number": [{"prompt": "x"}, {"prompt": 3}],
        "torn JSON": [{"prompt": "x"}, b"{"],
    }
    for number, (name, lines) in enumerate(held.items()):
        path = rows(folder / f"prompts-{number}.jsonl", *lines)
        cases.append((name, f"task.data.train={path}", path.name))
    (folder / "prompts.csv").write_text("a\nb\n")
    cases.append(("table", f"task.data.train={folder}/prompts.csv", "prompts.csv"))
    long = folder / "long.txt"
    long.write_text(
        "a handwritten one " * 2000 + "\n" + "".join(f"a handwritten {n}\n" for n in ("two", "three", "four"))
    )
    cases.append(("very long prompt", f"task.data.train={long}", "prompt"))
    same = folder / "same.txt"
    same.write_text("a handwritten one\n")
    cases.append(("held-out prompts of no kind", f"task.data.heldout=null task.data.eval={folder}/empty", "empty"))
    return cases


# --- statistics and demonstrations of robots ---


def statistics(folder: Path) -> Cases:
    right = {"q01": [-1.0, -1.0], "q99": [1.0, 1.0]}
    made: dict[str, tuple[Any, str]] = {
        "three numbers": ({"a": {"action": {"q01": [0, 0, 0], "q99": [1, 1, 1]}}}, "statistics"),
        "q01 above q99": ({"a": {"action": {"q01": [1, 1], "q99": [-1, -1]}}}, "statistics"),
        "q01 equal to q99": ({"a": {"action": {"q01": [1, 1], "q99": [1, 1]}}}, TAKEN),  # what never moved
        "two sets and no key": ({"a": {"action": right}, "b": {"action": right}}, "statistics_key"),
        "mean alone": ({"a": {"action": {"mean": [0, 0], "std": [1, 1]}}}, "statistics"),
        "a list": ([1], "statistics"),
        "no action": ({"a": {"state": right}}, "statistics"),
        "text for numbers": ({"a": {"action": {"q01": ["x", "y"], "q99": [1, 1]}}}, "statistics"),
        "not finite": ({"a": {"action": {"q01": [float("nan"), 0], "q99": [1, 1]}}}, "statistics"),
        "right": ({"a": {"action": right}}, TAKEN),
    }
    cases: Cases = []
    for number, (name, (held, wanted)) in enumerate(made.items()):
        path = folder / f"statistics-{number}.json"
        path.write_text(json.dumps(held))
        cases.append((name, f"action.statistics={path}", wanted))
    (folder / "torn.json").write_text("{")
    cases.append(("torn JSON", f"action.statistics={folder}/torn.json", "torn.json"))
    cases.append(("unknown key", f"action.statistics={folder}/statistics-9.json action.statistics_key=zz", "zz"))
    cases.append(("key without a file", "action.statistics_key=zz", "statistics_key"))
    cases.append(("folder without one", f"action.statistics={folder}/empty", "empty"))
    return cases


def lerobot(folder: Path) -> Cases:
    """Data sets in LeRobot's format 2.1, of images in Parquet."""
    good = _dataset(folder / "lr")
    changed: dict[str, tuple[dict[str, Any], str]] = {
        "three numbers an action": ({"action": [[0.0] * 3] * 5}, "action has 3"),
        "actions that are not finite": ({"action": [[float("nan")] * 2] * 5}, "finite"),
        "actions beyond the bounds": ({"action": [[7.0, 7.0]] * 5}, "[-1, 1]"),
        "no actions": ({"action": None}, "action"),
    }
    cases: Cases = [("as it is", _demonstrations(good), TAKEN)]
    for number, (name, (columns, wanted)) in enumerate(changed.items()):
        cases.append((name, _demonstrations(_dataset(folder / f"lr-{number}", **columns)), wanted))
    for name, wanted, told in (
        ("old version", "v1.6", {"codebase_version": "v1.6"}),
        ("no features", "features", {"features": None}),
        ("no episodes", "episode", {"total_episodes": 0}),
        ("no frames a second", "fps", {"fps": 0}),
    ):
        root = _dataset(folder / f"lr-{name.replace(' ', '-')}", told=told)
        if name == "no episodes":
            (root / "meta/episodes.jsonl").write_text("")
        cases.append((name, _demonstrations(root), wanted))
    for name, file, data in (
        ("torn info.json", "meta/info.json", b"{"),
        ("info.json of a list", "meta/info.json", b"[]"),
        ("torn Parquet", "data/chunk-000/episode_000000.parquet", b"PAR1"),
        ("torn list of episodes", "meta/episodes.jsonl", b"{"),
    ):
        root = shutil.copytree(good, folder / f"lr-{file.replace('/', '-')}-{len(data)}")
        (root / file).write_bytes(data)
        cases.append((name, _demonstrations(root), Path(file).name))
    root = shutil.copytree(good, folder / "lr-missing")
    (root / "data/chunk-000/episode_000000.parquet").unlink()
    cases += [
        ("missing Parquet", _demonstrations(root), "episode_000000.parquet"),
        ("folder that is not there", _demonstrations(Path("/nope")), "/nope"),
        ("folder that is not a data set", _demonstrations(folder / "empty"), "empty"),
        ("camera that is not there", _demonstrations(good, "camera: wrist"), "wrist"),
        ("more cameras than the simulator has", _demonstrations(good, "camera: [a, b]"), "must be 1 different names"),
        ("state that is not there", _demonstrations(good, "state: qpos"), "qpos"),
        ("option of the expert", _demonstrations(good, "noise: 0.1"), "unknown key task.demonstrations.noise"),
        ("more episodes than there are", _demonstrations(good, "episodes: 99"), TAKEN),
    ]
    return cases


def _demonstrations(root: Path, more: str = "") -> str:
    held = "{type: lerobot, path: " + str(root) + (f", {more}" if more else "") + "}"
    return f"algorithm={{type: supervised}} rollout={{prompts: 2}} task.demonstrations={held}"


def _dataset(root: Path, told: dict[str, Any] | None = None, **changed: Any) -> Path:
    file, n = io.BytesIO(), 5
    image(64, 64).save(file, "png")
    columns: dict[str, Any] = {
        "observation.state": [[0.1, 0.2]] * n,
        "action": [[0.1, -0.1]] * n,
        "timestamp": np.arange(n, dtype=np.float32) / 10,
        "frame_index": range(n),
        "episode_index": [0] * n,
        "index": range(n),
        "task_index": [0] * n,
        "observation.images.front": [{"bytes": file.getvalue(), "path": None}] * n,
    } | changed
    columns = {name: value for name, value in columns.items() if value is not None}
    width = len(columns["action"][0]) if "action" in columns else 2
    one = {"dtype": "float32", "shape": [2], "names": None}
    info: dict[str, Any] = {
        "codebase_version": "v2.1",
        "fps": 10,
        "chunks_size": 2,
        "total_episodes": 1,
        "total_frames": n,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
        "features": {
            "observation.state": one,
            "action": one | {"shape": [width]},
            "observation.images.front": {"dtype": "image", "shape": [64, 64, 3], "names": None},
        },
    }
    info = {name: value for name, value in (info | (told or {})).items() if value is not None}
    (root / "meta").mkdir(parents=True)
    (root / "meta/info.json").write_text(json.dumps(info))
    rows(root / "meta/episodes.jsonl", {"episode_index": 0, "tasks": ["reach for the red cube"], "length": n})
    rows(root / "meta/tasks.jsonl", {"task_index": 0, "task": "reach for the red cube"})
    (root / "data/chunk-000").mkdir(parents=True)
    parquet.write_table(pa.table(columns), root / "data/chunk-000/episode_000000.parquet")
    return root


# --- configuration files and run directories ---


def configurations(folder: Path, good: Path) -> list[tuple[str, Path, str]]:
    """Name, file, and what the line has to name."""
    texts: dict[str, tuple[bytes, str]] = {
        "tab": (b"steps:\t3\n\tx: 1", "not valid YAML"),
        "list": (b"- 1\n- 2\n", "expected a mapping"),
        "number": (b"3\n", "expected a mapping"),
        "word": (b"word\n", "config-3.yaml"),
        "nothing": (b"", "run_dir"),
        "latin-1": (b"run_dir: caf\xe9\n", "not valid YAML"),
        "zero bytes": (b"\0\0", "not valid YAML"),
        "key twice": (b"steps: 1\nsteps: 2\n", "duplicate key"),
        "torn": (b"optim: {lr: 1\n", "not valid YAML"),
        "two documents": (b"steps: 1\n---\nsteps: 2\n", "not valid YAML"),
        "another's tag": (b"run_dir: !!python/object/apply:os.system ['true']\n", "not valid YAML"),
        "base that is not there": (b"extends: nowhere.yaml\n", "nowhere.yaml"),
        "base of a number": (b"extends: 3\n", "extends"),
        "its own base": (b"extends: config-13.yaml\n", "extends"),
        "no run_dir": (b"steps: 3\n", "run_dir"),
        "number as a key": (b"3: 4\nrun_dir: r\n", "unknown key 3"),
        "null as a section": (f"extends: {good}\ntask: null\nmodel: null\n".encode(), "model.path is not set"),
        "anchors without an end": (b"a: &a [*a]\n", "config-17.yaml"),
        "many anchors": (
            b"a: &a [x,x,x,x,x,x,x,x,x]\n"
            + b"".join(f"{c}: &{c} [{','.join([f'*{chr(ord(c) - 1)}'] * 9)}]\n".encode() for c in "bcdefgh"),
            "config-18.yaml",
        ),
        "deep": (b"a: " + b"[" * 5000 + b"]" * 5000 + b"\n", "config-19.yaml"),
    }
    found = []
    for number, (name, (data, wanted)) in enumerate(texts.items()):
        path = folder / f"config-{number}.yaml"
        path.write_bytes(data)
        found.append((name, path, wanted))
    found += [
        ("not there", folder / "nope.yaml", "no configuration file"),
        ("folder", folder / "empty", "no configuration file"),
        ("JSON of rows", folder / "good.jsonl", "not valid YAML"),
        ("image", folder / "good.png", "not valid YAML"),
    ]
    return found
