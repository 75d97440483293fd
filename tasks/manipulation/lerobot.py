"""Demonstrations from a data set on disk in LeRobot's format, versions 2.0 to 3.0.

meta/info.json                     version, frame rate, path templates, features with their shapes
meta/episodes.jsonl, tasks.jsonl   2.x: length and instructions of each episode; data and videos by episode
meta/episodes/*/*.parquet          3.0: the same, and in which of the shared files each episode lies, and where
data/...parquet                    rows by frame: state, action, images of cameras that are not videos
videos/...mp4                      images of one camera
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as parquet
from numpy.typing import NDArray
from PIL import Image

from mmrl.errors import UserError
from mmrl.protocols.trajectory import RewardsToGo
from mmrl.tasks.manipulation.episodes import RecordedEpisode
from mmrl.tasks.manipulation.selection import EpisodeSelection
from mmrl.tasks.manipulation.videos import Decoder, Frames, VideoLengths, read_video, resized

GIBIBYTE = 1 << 30
EARNED = ("next.reward", "next.success")  # features of what a frame's action earned, which not all data sets have


@dataclass(frozen=True)
class DatasetColumns:
    """The features of images, state and action. camera: one for the simulator's whole image, or one for each of its
    cameras, in their order; None: the only one."""

    camera: str | Sequence[str] | None = None
    state: str = "observation.state"
    action: str = "action"


def load(
    folder: str,
    columns: DatasetColumns,
    *,
    chosen: EpisodeSelection,
    memory: float,
    action_dim: int,
    state_dim: int,
    image_shape: tuple[int, int, int],
    cameras: tuple[str, ...],
) -> list[RecordedEpisode]:
    """Reads the `chosen` episodes of the data set. States and actions are held in memory; so are images once
    they were read, if all of them, resized to `image_shape`, take at most `memory` GiB. cameras: the simulator's, whose
    images lie side by side in one of `image_shape`.

    Raises UserError naming the file where something is missing or does not fit the simulator's dimensions, and where
    more episodes than may be cannot be used.
    """
    try:
        dataset = _Dataset(Path(folder), columns, cameras)
    except (KeyError, TypeError, AttributeError) as error:  # a feature or an episode that lacks something
        raise UserError(f"{folder}/meta: not a data set in LeRobot's format: {type(error).__name__} {error}") from None
    if not dataset.episodes:
        raise UserError(f"{folder}/meta lists no episode to learn from")
    dataset.check(action_dim, state_dim, image_shape)
    episodes = {episode["episode_index"]: episode for episode in dataset.episodes}
    numbers = chosen.of(folder, list(episodes), dataset.splits)
    bytes_of_all = sum(episodes[number]["length"] for number in numbers) * int(np.prod(image_shape))
    keep = bytes_of_all <= memory * GIBIBYTE
    dataset.count_frames([episodes[number] for number in numbers])
    return chosen.usable(folder, numbers, lambda number: dataset.recorded(episodes[number], image_shape[:2], keep))


class _Dataset:
    def __init__(self, root: Path, columns: DatasetColumns, cameras: tuple[str, ...]) -> None:
        self.root, self.state, self.action = root, columns.state, columns.action
        path = _existing(root / "meta/info.json")
        info = _parsed(path, path.read_text())
        for key in ("codebase_version", "fps", "features", "data_path"):
            if not info.get(key):
                raise UserError(f"{path} has no {key}")
        self.version = str(info["codebase_version"])
        if self.version not in ("v2.0", "v2.1", "v3.0"):
            raise UserError(f"{root}/meta/info.json: version {self.version} is not known; convert it to v3.0")
        self.shared = self.version == "v3.0"  # files of many episodes
        self.fps, self.features = float(info["fps"]), info["features"]
        self.data_path, self.splits = info["data_path"], info.get("splits") or {}
        self.video_path: Any = info.get("video_path")
        self.chunk = info.get("chunks_size", 1000)
        self.shown = self._shown(columns.camera, len(cameras))  # features, from left to right
        self.cameras = cameras if len(self.shown) == len(cameras) else ("camera",)
        self.episodes = sorted(self._episodes(), key=lambda episode: episode["episode_index"])
        self._rows: tuple[Path, Mapping[str, NDArray]] | None = None  # of the file that was read last
        self._lengths = VideoLengths()

    def check(self, action_dim: int, state_dim: int, image_shape: tuple[int, int, int]) -> None:
        info = self.root / "meta/info.json"
        for name, size, verb in ((self.action, action_dim, "takes"), (self.state, state_dim, "gives")):
            if name not in self.features:
                raise UserError(f"{info} has no feature {name!r}; it has {list(self.features)}")
            if (count := int(np.prod(self.features[name]["shape"]))) != size:
                raise UserError(f"{info}: {name} has {count} numbers, but the simulator {verb} {size}")
        height, width = image_shape[0], image_shape[1] // len(self.shown)
        for camera in self.shown:
            shape = self.features[camera]["shape"]
            h, w = shape[1:] if shape[0] == 3 else shape[:2]
            if h * width != w * height:
                raise UserError(
                    f"{info}: {camera} has images of {h} x {w}, but the simulator's are {height} x {width}; their "
                    "sides must have the same ratio"
                )

    def _shown(self, chosen: str | Sequence[str] | None, cameras: int) -> list[str]:
        """Returns the features of the images. Raises UserError for features that are missing, or not as many as the
        simulator has cameras."""
        available = [name for name, feature in self.features.items() if feature["dtype"] in ("video", "image")]
        if chosen is None and len(available) != 1:
            several = "" if cameras == 1 else f", or {cameras}, one for each of the simulator's cameras,"
            raise UserError(
                f"{self.root} has the cameras {available}; choose one{several} with task.demonstrations.camera"
            )
        if chosen is None or isinstance(chosen, str):
            named = available if chosen is None else [chosen]
        else:
            named = list(chosen)
            if len(named) != cameras or len(set(named)) < cameras:
                raise UserError(
                    f"task.demonstrations.camera must be {cameras} different names, one for each of the simulator's "
                    f"cameras, not {named}"
                )
        for name in named:
            if name not in available:
                raise UserError(f"task.demonstrations.camera={name} is not in {self.root}; it has {available}")
        return named

    def recorded(self, episode: dict[str, Any], size: tuple[int, int], keep: bool) -> RecordedEpisode:
        number, length = episode["episode_index"], episode["length"]
        if len(episode["tasks"]) != 1:
            raise UserError(f"{self.root}: episode {number} has {len(episode['tasks'])} instructions; one is needed")
        file = self._data_file(episode)
        rows = self._episode_rows(file, number)
        if len(rows[self.action]) != length:
            raise UserError(f"{file}: episode {number} has {len(rows[self.action])} rows, its index says {length}")
        for name in (self.state, self.action):
            if not np.isfinite(rows[name]).all():
                raise UserError(f"{file}: {name} of episode {number} must hold finite numbers")
        if np.abs(rows["timestamp"] - np.arange(length) / self.fps).max() > 0.5 / self.fps:
            raise UserError(f"{file}: the timestamps of episode {number} are not those of {self.fps} frames a second")
        height, width = size
        parts = [self._decoder(camera, episode, file, (height, width // len(self.shown))) for camera in self.shown]

        def decode(first: int, count: int) -> NDArray[np.uint8]:
            return np.concatenate([part(first, count) for part in parts], 2)

        images: Any = Frames(length, decode, keep)
        name = f"{self.root.name}-{number}"
        return RecordedEpisode(
            name,
            episode["tasks"][0],
            images,
            rows[self.state],
            rows[self.action],
            self.cameras,
            earned(rows),
            solved_at_end(rows),
        )

    def _decoder(self, camera: str, episode: dict[str, Any], file: Path, size: tuple[int, int]) -> Decoder:
        """Returns the decoder of one camera's images in one episode."""
        if self.features[camera]["dtype"] == "video":
            video, start = self._video(camera, episode)
            self._lengths.check(video, start + episode["length"])
            return lambda first, count: resized(read_video(video, start + first, count, self.fps), size)
        number = episode["episode_index"]
        return lambda first, count: resized(self._images(camera, file, number)[first : first + count], size)

    def _episodes(self) -> list[dict[str, Any]]:
        """Returns the metadata of all episodes, from episodes.jsonl (v2) or Parquet files (v3)."""
        if not self.shared:
            path = _existing(self.root / "meta/episodes.jsonl")
            return [_parsed(path, line) for line in path.read_text().splitlines() if line.strip()]
        keys = ("chunk_index", "file_index", "from_timestamp")
        videos = [camera for camera in self.shown if self.features[camera]["dtype"] == "video"]
        where = [f"videos/{camera}/{key}" for camera in videos for key in keys]
        names = ["episode_index", "tasks", "length", "data/chunk_index", "data/file_index", *where]
        files = sorted((self.root / "meta/episodes").glob("*/*.parquet"))
        if not files:
            raise UserError(f"{self.root}/meta/episodes has no parquet file")
        return [row for file in files for row in _table(file, names).to_pylist()]

    def _data_file(self, episode: dict[str, Any]) -> Path:
        number = episode["episode_index"]
        if self.shared:
            fields = {"chunk_index": episode["data/chunk_index"], "file_index": episode["data/file_index"]}
        else:
            fields = {"episode_chunk": number // self.chunk, "episode_index": number}
        return _existing(self.root / self.data_path.format(**fields))

    def _video(self, camera: str, episode: dict[str, Any]) -> tuple[Path, int]:
        """Returns the file, which exists, and the index of the episode's first frame in it."""
        file, start = self._video_file(camera, episode)
        return _existing(file), start

    def _video_file(self, camera: str, episode: dict[str, Any]) -> tuple[Path, int]:
        """Returns the video file of an episode, and the frame at which the episode begins in it."""
        number, key = episode["episode_index"], f"videos/{camera}/"
        if self.shared:
            fields = {"chunk_index": episode[key + "chunk_index"], "file_index": episode[key + "file_index"]}
            start = round(episode[key + "from_timestamp"] * self.fps)
        else:
            fields, start = {"episode_chunk": number // self.chunk, "episode_index": number}, 0
        return self.root / self.video_path.format(video_key=camera, **fields), start

    def _episode_rows(self, file: Path, number: int) -> Mapping[str, NDArray]:
        """Returns state and action [frame, number], timestamp [frame], and what of EARNED the data set has, [frame,
        1]."""
        if self._rows is None or self._rows[0] != file:
            numbers = [self.state, self.action, *(name for name in EARNED if name in self.features)]
            table = _table(file, ["episode_index", "timestamp", *numbers])
            sizes = {name: int(np.prod(self.features[name]["shape"])) for name in numbers}
            columns = {name: _matrix(table[name], size, f"{file}: {name}") for name, size in sizes.items()}
            columns |= {name: table[name].to_numpy() for name in ("episode_index", "timestamp")}
            self._rows = file, columns
        in_episode = self._rows[1]["episode_index"] == number
        return {name: values[in_episode] for name, values in self._rows[1].items()}

    def count_frames(self, episodes: Sequence[dict[str, Any]]) -> None:
        """Counts the frames of the videos of episodes, so that one that was cut is noticed before training."""
        videos = [camera for camera in self.shown if self.features[camera]["dtype"] == "video"]
        if videos and self.video_path is None:
            raise UserError(f"{self.root}/meta/info.json has no video_path, but {videos[0]} is a video")
        located = {self._video_file(camera, episode)[0] for camera in videos for episode in episodes}
        self._lengths.count(sorted(file for file in located if file.is_file()))

    def _images(self, camera: str, file: Path, number: int) -> list[NDArray[np.uint8]]:
        column = _table(file, [camera], filters=[("episode_index", "=", number)])[camera].to_pylist()
        encoded = [cell["bytes"] or _existing(self.root / cell["path"]).read_bytes() for cell in column]
        return [np.asarray(Image.open(io.BytesIO(content)).convert("RGB")) for content in encoded]


def earned(rows: Mapping[str, NDArray]) -> RewardsToGo | None:
    """Returns what an episode earned, from its columns; None where the data set says neither reward nor success."""
    reward, success = (rows.get(name) for name in EARNED)
    if reward is None and success is None:
        return None
    length = len(rows["timestamp"])
    rewards = np.zeros(length, np.float32) if reward is None else reward[:, 0]
    return RewardsToGo(rewards, np.arange(length), 0.0 if success is None else float(success.any()))


def solved_at_end(rows: Mapping[str, NDArray]) -> bool:
    """Returns whether the last row of an episode is marked as a success. Other episodes count as cut off, for
    next.done is true at the end of every episode."""
    success = rows.get("next.success")
    return success is not None and bool(success[-1].any())


def _matrix(column: pa.ChunkedArray, size: int, where: str) -> NDArray[np.float32]:
    """Converts a column of lists of `size` numbers (or of numbers) to [row, size]. Raises UserError."""
    nested = pa.types.is_nested(column.type)
    values = (pc.list_flatten(column) if nested else column).to_numpy().astype(np.float32)
    if len(values) != size * len(column):
        raise UserError(f"{where} must hold {size} numbers a row")
    return values.reshape(len(column), size)


def _table(file: Path, names: list[str], filters: list[tuple[str, str, int]] | None = None) -> pa.Table:
    """Reads columns of a Parquet file. Raises UserError for another file, and where a column is missing."""
    try:
        columns = parquet.read_schema(file).names
    except pa.ArrowInvalid as error:
        raise UserError(f"{file} is not a Parquet file: {error}") from None
    missing = [name for name in names if name not in columns]
    if missing:
        raise UserError(f"{file} has no column {missing[0]!r}; it has {columns}")
    return parquet.read_table(file, columns=names, filters=filters)


def _parsed(file: Path, text: str) -> dict[str, Any]:
    """Parses a JSON object. Raises UserError."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{file}: expected an object, not {text[:50]!r}")
    return value


def _existing(file: Path) -> Path:
    if not file.is_file():
        raise UserError(f"task.demonstrations.path: {file} is missing")
    return file
