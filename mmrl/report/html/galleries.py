"""Collects tables of samples, images and videos of a run for its report page."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import nh3

from mmrl.report.records import RunRecord

BUDGET = 1_700_000  # characters of all galleries of a page, so that it stays below 2 MB
MEDIA_TYPES = {".png": "image/png", ".gif": "image/gif", ".mp4": "video/mp4"}
STEP = re.compile(r"(?P<kind>[a-z]+)-(?P<step>\d{6})(?:-\d{3})?")
TITLES = {"evaluation": "Held-out prompts", "train": "Training prompts", "samples": "Written by mmrl sample"}
# HTML of tables of samples (`mmrl.report.run.sample_table`). Anything else in a file is removed, so that the page of a
# run from elsewhere cannot run scripts.
TAGS = {"table", "tbody", "tr", "th", "td", "div", "pre", "b", "i", "img", "video"}
VIDEO_ATTRIBUTES = {"src", "controls", "loop", "muted", "playsinline"}
ATTRIBUTES = {"img": {"src"}, "video": VIDEO_ATTRIBUTES, "b": {"class"}, "td": {"rowspan", "data-name"}}
CLASSES = {"table": {"tiles"}, "tr": {"success", "failure", "lost"}}  # others are removed


@dataclass
class Moment:
    """The images, videos and table of samples of one step."""

    step: int | None  # None: written by mmrl sample
    table: str = ""  # HTML that has been cleaned
    images: list[str] = field(default_factory=list)  # data URLs
    videos: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.table) + sum(map(len, [*self.images, *self.videos]))

    @property
    def title(self) -> str:
        return "now" if self.step is None else f"step {self.step}"


@dataclass(frozen=True)
class Gallery:
    """The samples of one kind (a key of TITLES) over the steps. left_out: the number of steps that exceeded the
    budget."""

    title: str
    moments: list[Moment]
    left_out: int

    @property
    def compared(self) -> list[Moment]:
        """The first and the last step, for a comparison side by side; [] unless both have images of the same prompts
        from the same noise."""
        ends = [self.moments[0], self.moments[-1]] if len(self.moments) > 1 else []
        return ends if self.title == TITLES["evaluation"] and all(moment.images for moment in ends) else []


def galleries(run: RunRecord, budget: int = BUDGET) -> list[Gallery]:
    """Returns the galleries of a run within `budget` characters. If not all steps fit, the last and the first of each
    kind are taken before those in between, see `by_priority`."""
    by_kind = {kind: files(run.folder, kind) for kind in TITLES}
    candidates = sorted(
        ((rank, kind, step) for kind, by_step in by_kind.items() for rank, step in by_priority(list(by_step))),
        key=lambda entry: entry[0],
    )
    selected: dict[str, list[Moment]] = {kind: [] for kind in TITLES}
    for _, kind, step in candidates:
        moment = moment_of(step, by_kind[kind][step])
        if moment.size <= budget:
            budget -= moment.size
            selected[kind].append(moment)
    return [
        Gallery(TITLES[kind], sorted(moments, key=lambda moment: moment.step or 0), len(by_kind[kind]) - len(moments))
        for kind, moments in selected.items()
        if by_kind[kind]
    ]


def files(folder: Path, kind: str) -> dict[int | None, list[Path]]:
    """Returns the image and table files of a gallery, by training step.

    folder: the run directory. kind: "train" or "evaluation", whose files are in samples/; or "samples", the files that
    `mmrl sample` wrote into the run directory, which belong to no step (None).
    """
    if kind == "samples":
        paths = sorted(path for path in folder.glob("samples*") if path.is_file())
        return {None: paths} if paths else {}
    by_step: dict[int | None, list[Path]] = {}
    for path in sorted((folder / "samples").glob(f"{kind}-*")):
        if named := STEP.fullmatch(path.stem):
            by_step.setdefault(int(named["step"]), []).append(path)
    return by_step


def by_priority(steps: Sequence[int | None]) -> Iterable[tuple[int, int | None]]:
    """Returns (rank, step) in order of priority: the last, the first, then each time the step that is farthest from
    those already taken."""
    order, remaining = [], list(range(len(steps)))
    for index in (len(steps) - 1, 0):
        if index in remaining:
            order.append(index)
            remaining.remove(index)
    while remaining:
        farthest = max(remaining, key=lambda i: (min(abs(i - j) for j in order), i))
        order.append(farthest)
        remaining.remove(farthest)
    return [(rank, steps[index]) for rank, index in enumerate(order)]


def moment_of(step: int | None, paths: Sequence[Path]) -> Moment:
    """Reads the files of one step. A video that the table of samples names is embedded in the table, others are listed
    beside it. step: None for files written by `mmrl sample`."""
    urls = {path: data_url(path) for path in paths if path.suffix in MEDIA_TYPES}
    videos = {path.name: url for path, url in urls.items() if path.suffix == ".mp4"}
    moment = Moment(step, images=[url for path, url in urls.items() if path.suffix != ".mp4"])
    for page in (path.read_text(errors="replace") for path in paths if path.suffix == ".html"):
        named = {name: url for name, url in videos.items() if f'<video src="{name}"' in page}
        for name, url in named.items():
            page = page.replace(f'<video src="{name}"', f'<video src="{url}"')
            del videos[name]
        moment.table = table_of(page)
    moment.videos = list(videos.values())
    return moment


def data_url(path: Path) -> str:
    return f"data:{MEDIA_TYPES[path.suffix]};base64,{base64.b64encode(path.read_bytes()).decode()}"


def table_of(page: str) -> str:
    """Returns the table in a page of samples, sanitised; closed properly even if the file is cut off."""
    start = page.find("<table")
    if start < 0:
        return ""
    return nh3.clean(
        page[start:],
        tags=TAGS,
        attributes=ATTRIBUTES,
        allowed_classes=CLASSES,
        attribute_filter=allowed_attribute,
        url_schemes={"data"},
        link_rel=None,
    )


def allowed_attribute(tag: str, attribute: str, value: str) -> str | None:
    """Returns the value of an attribute; None for a `src` outside the page."""
    return None if attribute == "src" and not value.startswith("data:") else value
