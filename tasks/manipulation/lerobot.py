"""Demonstrations from a dataset on disk in LeRobot's format, versions 2.0 to 3.0.

meta/info.json                     version, frame rate, path templates, features with their shapes
meta/episodes.jsonl, tasks.jsonl   2.x: length and instructions of each episode; one data file and video an episode
meta/episodes/*/*.parquet          3.0: the same, and the file and position of each episode; files hold many episodes
data/...parquet                    a row for each frame: state, action, images of cameras that are not videos
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
from mmrl.tasks.manipulation.videos import Decoder, Frames, VideoLengths, read_video, resize

GIBIBYTE = 1 << 30
REWARD_FEATURES = ("next.reward", "next.success")  # not all datasets have them


@dataclass(frozen=True)
class DatasetColumns:
    """The names of the features with images, state and action.

    camera: one feature for the simulator's full image, or one for each of its cameras, in their order; None: the only
    feature with images.
    """

    camera: str | Sequence[str] | None = None
    state: str = "observation.state"
    action: str = "action"


def load(
    folder: str,
    columns: DatasetColumns,
    *,
    selection: EpisodeSelection,
    memory_gib: float,
    action_dim: int,
    state_dim: int,
    image_shape: tuple[int, int, int],
    cameras: tuple[str, ...],
) -> list[RecordedEpisode]:
    """Reads the selected episodes of a dataset.

    States and actions are held in memory. Images are decoded on access, resized to `image_shape` (height, width, 3),
    and then cached if all of them together need at most `memory_gib`. cameras: the simulator's cameras, whose images
    are side by side in one image of `image_shape`.

    Raises UserError with the name of the file if something is missing or does not fit the simulator's dimensions, and
    if the share of unusable episodes exceeds the selection's limit.
    """
    try:
        dataset = _Dataset(Path(folder), columns, cameras)
    except (KeyError, TypeError, AttributeError) as error:  # the metadata of a feature or an episode are incomplete
        raise UserError(f"{folder}/meta: not a dataset in LeRobot's format: {type(error).__name__} {error}") from None
    if not dataset.episodes:
        raise UserError(f"{folder}/meta lists no episodes; copy the whole dataset")
    dataset.check(action_dim, state_dim, image_shape)
    episodes = {episode["episode_index"]: episode for episode in dataset.episodes}
    numbers = selection.select(folder, list(episodes), dataset.splits)
    total_bytes = sum(episodes[number]["length"] for number in numbers) * int(np.prod(image_shape))
    keep = total_bytes <= memory_gib * GIBIBYTE
    dataset.count_frames([episodes[number] for number in numbers])
    return selection.read_usable(
        folder, numbers, lambda number: dataset.read_episode(episodes[number], image_shape[:2], keep)
    )


class _Dataset:
    """A dataset in LeRobot's format: its metadata, and access to its episodes."""

    def __init__(self, root: Path, columns: DatasetColumns, cameras: tuple[str, ...]) -> None:
        """Reads the metadata of the dataset in the folder `root`. cameras: the simulator's. Raises UserError if
        metadata are missing, or of an unknown version."""
        self.root, self.state, self.action = root, columns.state, columns.action
        path = _existing(root / "meta/info.json")
        info = _parsed(path, path.read_text())
        for key in ("codebase_version", "fps", "features", "data_path"):
            if not info.get(key):
                raise UserError(
                    f"{path} has no key {key}, which LeRobot's formats 2.0 to 3.0 have; copy meta/ again, or convert "
                    "the dataset to v3.0"
                )
        self.version = str(info["codebase_version"])
        if self.version not in ("v2.0", "v2.1", "v3.0"):
            raise UserError(f"{root}/meta/info.json: unknown version {self.version}; convert the dataset to v3.0")
        self.shared = self.version == "v3.0"  # whether a file holds many episodes
        self.fps, self.features = float(info["fps"]), info["features"]
        self.data_path, self.splits = info["data_path"], info.get("splits") or {}
        self.video_path: Any = info.get("video_path")
        self.chunk_size = info.get("chunks_size", 1000)  # episodes of a folder, in versions 2.x
        self.image_features = self._select_features(columns.camera, len(cameras))  # from left to right
        self.cameras = cameras if len(self.image_features) == len(cameras) else ("camera",)
        self.episodes = sorted(self._episodes(), key=lambda episode: episode["episode_index"])
        self._rows: tuple[Path, Mapping[str, NDArray]] | None = None  # the file that was read last, and its columns
        self._lengths = VideoLengths()

    def check(self, action_dim: int, state_dim: int, image_shape: tuple[int, int, int]) -> None:
        """Raises UserError if actions, states or images do not fit the simulator's dimensions. image_shape: (height,
        width, 3), with the images of all cameras side by side."""
        info = self.root / "meta/info.json"
        for key, name, size, verb in (
            ("action", self.action, action_dim, "takes"),
            ("state", self.state, state_dim, "gives"),
        ):
            if name not in self.features:
                raise UserError(
                    f"{info} has no feature {name!r}; set task.demonstrations.{key} to one of "
                    f"{', '.join(self.features)}"
                )
            if (dim := int(np.prod(self.features[name]["shape"]))) != size:
                raise UserError(
                    f"{info}: {name} has {dim} numbers, but the simulator {verb} {size}; set "
                    f"task.demonstrations.{key} to another feature"
                )
        height, width = image_shape[0], image_shape[1] // len(self.image_features)
        for camera in self.image_features:
            shape = self.features[camera]["shape"]
            h, w = shape[1:] if shape[0] == 3 else shape[:2]  # channels come first or last
            if h * width != w * height:
                raise UserError(
                    f"{info}: {camera} has images of {h} x {w}, but the simulator's are {height} x {width}; their "
                    "sides must have the same ratio"
                )

    def _select_features(self, camera: str | Sequence[str] | None, num_cameras: int) -> list[str]:
        """Returns the features with images. camera: see `DatasetColumns`. Raises UserError if a feature is missing, or
        there are not as many as the simulator has cameras."""
        available = [name for name, feature in self.features.items() if feature["dtype"] in ("video", "image")]
        if camera is None and len(available) != 1:
            several = "" if num_cameras == 1 else f", or {num_cameras}, one for each of the simulator's cameras,"
            raise UserError(
                f"{self.root} has the cameras {available}; select one{several} with task.demonstrations.camera"
            )
        if camera is None or isinstance(camera, str):
            selected = available if camera is None else [camera]
        else:
            selected = list(camera)
            if len(selected) != num_cameras or len(set(selected)) < num_cameras:
                raise UserError(
                    f"task.demonstrations.camera must be {num_cameras} different names, one for each of the "
                    f"simulator's cameras, not {selected}"
                )
        for name in selected:
            if name not in available:
                raise UserError(f"task.demonstrations.camera={name} is not in {self.root}; choose one of {available}")
        return selected

    def read_episode(self, episode: dict[str, Any], size: tuple[int, int], keep: bool) -> RecordedEpisode:
        """Reads an episode; its images are decoded on access.

        episode: its metadata. size: height and width of an image with all cameras. keep: whether decoded images are
        cached. Raises UserError if the episode is incomplete or inconsistent.
        """
        number, length = episode["episode_index"], episode["length"]
        if len(episode["tasks"]) != 1:
            raise UserError(f"{self.root}: episode {number} has {len(episode['tasks'])} instructions; it must have one")
        file = self._data_file(episode)
        rows = self._episode_rows(file, number)
        if len(rows[self.action]) != length:
            raise UserError(
                f"{file}: episode {number} has {len(rows[self.action])} rows, but {length} according to meta/; copy "
                "the dataset again"
            )
        for name in (self.state, self.action):
            if not np.isfinite(rows[name]).all():
                raise UserError(f"{file}: {name} of episode {number} must hold finite numbers")
        if np.abs(rows["timestamp"] - np.arange(length) / self.fps).max() > 0.5 / self.fps:
            raise UserError(
                f"{file}: the timestamps of episode {number} do not fit the dataset's fps={self.fps:g}; correct fps "
                "in meta/info.json"
            )
        height, width = size
        camera_size = height, width // len(self.image_features)
        decoders = [self._decoder(camera, episode, file, camera_size) for camera in self.image_features]

        def decode(first: int, num_frames: int) -> NDArray[np.uint8]:
            """Decodes frames, with the images of all cameras side by side: [frame, height, width, 3]."""
            return np.concatenate([decoder(first, num_frames) for decoder in decoders], 2)

        images: Any = Frames(length, decode, keep)
        name = f"{self.root.name}-{number}"
        return RecordedEpisode(
            name,
            episode["tasks"][0],
            images,
            rows[self.state],
            rows[self.action],
            self.cameras,
            rewards_to_go(rows),
            solved_at_end(rows),
        )

    def _decoder(self, camera: str, episode: dict[str, Any], file: Path, size: tuple[int, int]) -> Decoder:
        """Returns the decoder of one camera's images in one episode. size: height and width of its images."""
        if self.features[camera]["dtype"] == "video":
            video, start = self._video(camera, episode)
            self._lengths.check(video, start + episode["length"])
            return lambda first, num_frames: resize(read_video(video, start + first, num_frames, self.fps), size)
        number = episode["episode_index"]
        return lambda first, num_frames: resize(self._images(camera, file, number)[first : first + num_frames], size)

    def _episodes(self) -> list[dict[str, Any]]:
        """Returns the metadata of all episodes, from episodes.jsonl (v2) or Parquet files (v3)."""
        if not self.shared:
            path = _existing(self.root / "meta/episodes.jsonl")
            return [_parsed(path, line) for line in path.read_text().splitlines() if line.strip()]
        keys = ("chunk_index", "file_index", "from_timestamp")
        videos = [camera for camera in self.image_features if self.features[camera]["dtype"] == "video"]
        video_columns = [f"videos/{camera}/{key}" for camera in videos for key in keys]
        names = ["episode_index", "tasks", "length", "data/chunk_index", "data/file_index", *video_columns]
        files = sorted((self.root / "meta/episodes").glob("*/*.parquet"))
        if not files:
            raise UserError(f"{self.root}/meta/episodes has no parquet file; copy the whole dataset")
        return [row for file in files for row in _table(file, names).to_pylist()]

    def _data_file(self, episode: dict[str, Any]) -> Path:
        """Returns the Parquet file with an episode's rows. Raises UserError if it does not exist."""
        number = episode["episode_index"]
        if self.shared:
            fields = {"chunk_index": episode["data/chunk_index"], "file_index": episode["data/file_index"]}
        else:
            fields = {"episode_chunk": number // self.chunk_size, "episode_index": number}
        return _existing(self.root / self.data_path.format(**fields))

    def _video(self, camera: str, episode: dict[str, Any]) -> tuple[Path, int]:
        """Returns the video file of an episode, and the index of the episode's first frame in it. Raises UserError if
        the file does not exist."""
        file, start = self._video_file(camera, episode)
        return _existing(file), start

    def _video_file(self, camera: str, episode: dict[str, Any]) -> tuple[Path, int]:
        """Returns the video file of an episode, and the index of the episode's first frame in it."""
        number, key = episode["episode_index"], f"videos/{camera}/"
        if self.shared:
            fields = {"chunk_index": episode[key + "chunk_index"], "file_index": episode[key + "file_index"]}
            start = round(episode[key + "from_timestamp"] * self.fps)
        else:
            fields, start = {"episode_chunk": number // self.chunk_size, "episode_index": number}, 0
        return self.root / self.video_path.format(video_key=camera, **fields), start

    def _episode_rows(self, file: Path, number: int) -> Mapping[str, NDArray]:
        """Returns the columns of an episode by name: state [frame, state], action [frame, action], timestamp and
        episode_index [frame], and the REWARD_FEATURES that the dataset has, [frame, 1]."""
        if self._rows is None or self._rows[0] != file:
            names = [self.state, self.action, *(name for name in REWARD_FEATURES if name in self.features)]
            table = _table(file, ["episode_index", "timestamp", *names])
            sizes = {name: int(np.prod(self.features[name]["shape"])) for name in names}
            columns = {name: _matrix(table[name], size, f"{file}: {name}") for name, size in sizes.items()}
            columns |= {name: table[name].to_numpy() for name in ("episode_index", "timestamp")}
            self._rows = file, columns
        in_episode = self._rows[1]["episode_index"] == number
        return {name: values[in_episode] for name, values in self._rows[1].items()}

    def count_frames(self, episodes: Sequence[dict[str, Any]]) -> None:
        """Counts the frames of the episodes' videos, so that a truncated one is found before training. Raises UserError
        if the dataset does not say where its videos are."""
        videos = [camera for camera in self.image_features if self.features[camera]["dtype"] == "video"]
        if videos and self.video_path is None:
            raise UserError(
                f"{self.root}/meta/info.json has no key video_path, but the feature {videos[0]} is a video; add it"
            )
        files = {self._video_file(camera, episode)[0] for camera in videos for episode in episodes}
        self._lengths.count(sorted(file for file in files if file.is_file()))

    def _images(self, camera: str, file: Path, number: int) -> list[NDArray[np.uint8]]:
        """Returns the images of an episode, [height, width, 3] each, for a feature that is not a video."""
        column = _table(file, [camera], filters=[("episode_index", "=", number)])[camera].to_pylist()
        encoded = [cell["bytes"] or _existing(self.root / cell["path"]).read_bytes() for cell in column]
        return [np.asarray(Image.open(io.BytesIO(content)).convert("RGB")) for content in encoded]


def rewards_to_go(rows: Mapping[str, NDArray]) -> RewardsToGo | None:
    """Returns the rewards of a whole episode, from its columns: of each step, with the number of actions before it, and
    1 as the outcome if a step is a success. Returns None if the dataset has neither rewards nor success."""
    reward, success = (rows.get(name) for name in REWARD_FEATURES)
    if reward is None and success is None:
        return None
    length = len(rows["timestamp"])
    rewards = np.zeros(length, np.float32) if reward is None else reward[:, 0]
    outcome = 0.0 if success is None else float(success.any())
    return RewardsToGo(rewards, elapsed=np.arange(length), outcome=outcome)


def solved_at_end(rows: Mapping[str, NDArray]) -> bool:
    """Returns whether the last row of an episode is marked as a success. Other episodes count as truncated, since
    next.done is true at the end of each episode."""
    success = rows.get("next.success")
    return success is not None and bool(success[-1].any())


def _matrix(column: pa.ChunkedArray, size: int, name: str) -> NDArray[np.float32]:
    """Converts a column of lists of `size` numbers (or of numbers) to [row, size]. name: file and column, for messages.
    Raises UserError if a row has another size."""
    nested = pa.types.is_nested(column.type)
    values = (pc.list_flatten(column) if nested else column).to_numpy().astype(np.float32)
    if len(values) != size * len(column):
        raise UserError(f"{name} must have {size} numbers in each row")
    return values.reshape(len(column), size)


def _table(file: Path, names: list[str], filters: list[tuple[str, str, int]] | None = None) -> pa.Table:
    """Reads columns of a Parquet file. filters: conditions (column, operator, number) that rows must meet. Raises
    UserError if it is not a Parquet file, or a column is missing."""
    try:
        columns = parquet.read_schema(file).names
    except pa.ArrowInvalid as error:
        raise UserError(f"{file} is not a Parquet file: {error}") from None
    missing = [name for name in names if name not in columns]
    if missing:
        raise UserError(f"{file} has no column {missing[0]!r}; it has {columns}")
    return parquet.read_table(file, columns=names, filters=filters)


def _parsed(file: Path, text: str) -> dict[str, Any]:
    """Parses a JSON object of a file. Raises UserError if it is not one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{file}: expected an object, not {text[:50]!r}")
    return value


def _existing(file: Path) -> Path:
    """Returns the path. Raises UserError if there is no such file."""
    if not file.is_file():
        raise UserError(f"task.demonstrations.path: {file} is missing; copy the whole dataset")
    return file
