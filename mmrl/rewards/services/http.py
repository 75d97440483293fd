"""A reward that another process computes. Samples are sent by HTTP as JSON or npz, never as pickles, and scores come
back.

The request is a JSON object {"samples": [...], "group": [...] or null}. In JSON, a sample's image is a PNG in base64.
In npz, the JSON text is the array "request" (uint8, UTF-8), and the image of sample i is the array "image_i" [channel,
height, width]. The images of a prompt are PNGs in base64 in both. The answer is always a JSON object {"scores": [number
or null, ...]}, one for each sample, null where it could not be scored. It may also have "spans", for each sample null
or {"of": "characters", "values": [[begin, end, value], ...]} (see `mmrl.rollouts.Spans`): a process reward, whose total
is the score.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from time import monotonic, sleep
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mmrl.errors import UserError
from mmrl.rewards.types import Score, as_pil
from mmrl.rollouts import Prompt, Sample, Spans, Video
from mmrl.runtime.timed_calls import TimeLimit, call_in_time

JSON, NPZ = "application/json", "application/x-npz"
BACKOFF_S = (0.5, 8.0)  # seconds before the first retry, and the maximum; doubled at each retry
MAX_ANSWER = 64 * 2**20  # bytes
# Fields of a prompt and of a sample in a request, with their types.
_PROMPT = {"id": str, "text": str, "answer": object, "system": object, "metadata": dict}
_SAMPLE = {"response": str, "response_length": int, "truncated": bool, "max_response_length": int}


class HttpReward:
    """The scores of a reward server at `url`, such as `python -m mmrl.rewards.services.server`.

    A request is sent again, at most `retries` times with growing pauses, if there is no connection, no complete answer
    after `deadline_s` seconds, or a status of 5xx or 429. Then, and at once for every other fault, score() raises
    UserError. scope: "group" sends each group in a request of its own. pixels: the dtype of images in npz: "float32",
    unchanged, or "uint8", clamped to 0..1 and rounded as in a PNG.
    """

    def __init__(
        self,
        *,
        url: str,
        deadline_s: float = 60.0,
        retries: int = 3,
        format: Literal["json", "npz"] = "json",
        pixels: Literal["uint8", "float32"] = "float32",
        scope: Literal["sample", "group"] = "sample",
    ):
        check_address("url", url, deadline_s, retries)
        for name, value, valid in (
            ("format", format, ("json", "npz")),
            ("pixels", pixels, ("uint8", "float32")),
            ("scope", scope, ("sample", "group")),
        ):
            if value not in valid:
                raise ValueError(f"{name} must be one of {', '.join(valid)}, not {value!r}")
        self.url, self.deadline_s, self.retries = url, deadline_s, retries
        self.format, self.pixels, self.scope = format, pixels, scope

    def score(self, samples: Sequence[Sample]) -> Sequence[Score | Spans]:
        """Sends the samples to the server and returns its scores, with spans where it answers with any. Raises
        UserError for an answer of another form."""
        # with scope "group" each call gets the samples of one group, here number 0
        body = encode(samples, [0] * len(samples) if self.scope == "group" else None, self.format, self.pixels)
        kind = JSON if self.format == "json" else NPZ
        answer = post(self.url, body, {"Content-Type": kind}, deadline_s=self.deadline_s, retries=self.retries)
        scores = answer.get("scores")
        if not isinstance(scores, list):
            raise UserError(
                f"reward server {self.url} answered without a list of scores under `scores`: {str(answer)[:200]}"
            )
        spans = answer.get("spans")
        if spans is None:
            return scores
        if not isinstance(spans, list) or len(spans) != len(scores):
            raise UserError(
                f"reward server {self.url} answered with spans that are not a list with one entry for each score: "
                f"{str(spans)[:100]}"
            )
        return [_with_spans(self.url, score, value) for score, value in zip(scores, spans, strict=True)]


def _with_spans(url: str, score: Score, spans: Any) -> Score | Spans:
    """Returns the spans of one sample with the score as their total; the score if it has no spans."""
    if score is None or spans is None:
        return score
    if not isinstance(spans, dict) or not isinstance(spans.get("values"), list):
        raise UserError(
            f"reward server {url}: spans must be null or an object with a list `values`, not {spans!r:.100}"
        )
    return Spans(spans["values"], score, spans.get("of", "characters"))


def check_address(key: str, url: str, deadline_s: float, retries: int) -> None:
    """Raises ValueError for an address that is not http(s), a deadline that is not positive, and negative retries. key:
    the option that holds the address."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{key} must be an address that begins with http:// or https://, not {url!r}")
    if deadline_s <= 0:
        raise ValueError(f"deadline_s must be positive, not {deadline_s}")
    if retries < 0:
        raise ValueError(f"retries must be 0 or more, not {retries}")


def post(url: str, body: bytes, headers: Mapping[str, str], *, deadline_s: float, retries: int) -> dict[str, Any]:
    """Posts `body` and returns the JSON object of the answer.

    Raises UserError after 1 + `retries` requests without a connection, without an answer in `deadline_s` seconds, or
    with a status of 5xx or 429; at once for another status than 200, and for an answer that is not a JSON object.
    """
    import requests

    start, pause, reason = monotonic(), BACKOFF_S[0], ""
    for attempt in range(1 + retries):
        if attempt:
            sleep(pause)
            pause = min(2 * pause, BACKOFF_S[1])
        try:
            status, text = _exchange_in_time(lambda limit_s: _exchange(url, body, headers, limit_s), deadline_s)
        except requests.RequestException as error:
            reason = f"{type(error).__name__}: {error}"
            continue
        if status == 200:
            return _json_object(url, text)
        reason = f"status {status}: {text[:300].decode(errors='replace')}"
        if status < 500 and status != 429:
            raise UserError(f"reward server {url} refused the request: {' '.join(reason.split())}")
    seconds = monotonic() - start
    reason = " ".join(reason.split())
    raise UserError(f"reward server {url} did not answer in {1 + retries} tries, {seconds:.1f} s: {reason}")


def _exchange_in_time(exchange: Callable[[float], tuple[int, bytes]], deadline_s: float) -> tuple[int, bytes]:
    """Runs an exchange and returns its status and body. Raises requests.Timeout if it takes longer than `deadline_s`;
    see `call_in_time`."""
    import requests

    try:
        return call_in_time(lambda: exchange(deadline_s), deadline_s)
    except TimeLimit:
        raise requests.Timeout(f"the answer was not complete after {deadline_s:g} s") from None


def _exchange(url: str, body: bytes, headers: Mapping[str, str], deadline_s: float) -> tuple[int, bytes]:
    """Sends a request and returns status and body. Raises requests.RequestException for every failure, also for an
    answer that takes too long."""
    import requests
    import urllib3

    with requests.post(
        url, data=body, headers=dict(headers), timeout=deadline_s, stream=True, allow_redirects=False
    ) as answer:
        text = b""
        try:
            while chunk := answer.raw.read1(2**16, decode_content=True):
                text += chunk
                if len(text) > MAX_ANSWER:
                    raise requests.RequestException(f"the answer is longer than {MAX_ANSWER} bytes")
        except urllib3.exceptions.HTTPError as error:
            raise requests.ConnectionError(str(error)) from error
        return answer.status_code, text


def _json_object(url: str, text: bytes) -> dict[str, Any]:
    """Parses an answer. Raises UserError if it is not a JSON object."""
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise UserError(f"server {url} did not answer with a JSON object: {text[:200]!r}")
    return answer


def png_base64(image: Image.Image) -> str:
    """Encodes an image as a PNG in base64."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def encode(samples: Sequence[Sample], group: Sequence[int] | None, format: str, pixels: str = "float32") -> bytes:
    """Encodes samples as the body of a request.

    group: the number of each sample's group; None if the reward needs none. format, pixels: as for `HttpReward`. Raises
    UserError for an answer or metadata that JSON cannot hold.
    """
    rows: list[dict[str, Any]] = []
    arrays: dict[str, np.ndarray] = {}
    for number, sample in enumerate(samples):
        row = {key: getattr(sample, key) for key in _SAMPLE}
        row |= {key: getattr(sample.prompt, key) for key in _PROMPT}
        row["images"] = [png_base64(image) for image in sample.prompt.images]
        if sample.prompt.videos:
            row["videos"] = [
                {"frames": list(map(png_base64, video.frames)), "fps": video.fps} for video in sample.prompt.videos
            ]
        if sample.image is not None and format == "json":
            row["image"] = png_base64(_to_pil_same_channels(sample.image))
        if sample.frames is not None and format == "json":
            row["frames"] = [png_base64(_to_pil_same_channels(frame)) for frame in sample.frames]
        if format == "npz":
            generated = {f"image_{number}": sample.image, f"frames_{number}": sample.frames}
            for name, values in generated.items():
                if values is not None:
                    arrays[name] = (_to_bytes(values) if pixels == "uint8" else values.float()).numpy()
        rows.append(row)
    try:
        text = json.dumps({"samples": rows, "group": None if group is None else list(group)}).encode()
    except TypeError as error:
        wrong = next((s.prompt.id for s, row in zip(samples, rows, strict=True) if not _is_json(row)), "of this batch")
        raise UserError(
            f"prompt {wrong}: its answer or metadata cannot be sent to a reward server, which reads JSON: {error}"
        ) from None
    if format == "json":
        return text
    file = io.BytesIO()
    np.savez_compressed(file, allow_pickle=False, request=np.frombuffer(text, np.uint8), **arrays)
    return file.getvalue()


def _is_json(row: object) -> bool:
    try:
        json.dumps(row)
    except TypeError:
        return False
    return True


def decode(body: bytes, format: str, *, max_bytes: int) -> tuple[list[Sample], Tensor | None]:
    """Decodes samples and group from a request's body.

    max_bytes: largest size that an npz may unpack to. Raises ValueError for anything that `encode` does not produce.
    """
    arrays = _arrays(body, max_bytes) if format == "npz" else {}
    text = arrays.pop("request").tobytes() if format == "npz" else body
    request = json.loads(text)
    if not isinstance(request, dict) or not isinstance(request.get("samples"), list):
        raise ValueError("the request must be a JSON object with a list of samples under the key `samples`")
    samples = [
        _sample(row, number, arrays.pop(f"image_{number}", None), arrays.pop(f"frames_{number}", None))
        for number, row in enumerate(request["samples"])
    ]
    if arrays:
        raise ValueError(f"the npz has arrays that belong to no sample: {', '.join(arrays)}")
    group = request.get("group")
    if group is None:
        return samples, None
    if not isinstance(group, list) or len(group) != len(samples) or not all(isinstance(key, int) for key in group):
        raise ValueError("group must be null or a list of one integer for each sample")
    return samples, torch.tensor(group, dtype=torch.int64)


def _arrays(body: bytes, max_bytes: int) -> dict[str, np.ndarray]:
    """Reads the arrays of an npz file without pickles. Raises ValueError for another file, and for more than
    `max_bytes` unpacked."""
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            if sum(member.file_size for member in archive.infolist()) > max_bytes:
                raise ValueError(
                    f"the request's npz unpacks to more than {max_bytes} bytes; send fewer samples at once"
                )
        with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
            contents = {name: arrays[name] for name in arrays.files}
    except zipfile.BadZipFile as error:
        raise ValueError(f"not an npz file: {error}") from None
    if contents.get("request", np.empty(0)).dtype != np.uint8:
        raise ValueError("the npz has no array `request` of uint8")
    return contents


def _sample(row: object, number: int, image_array: np.ndarray | None, frames_array: np.ndarray | None) -> Sample:
    """Decodes sample `number` of a request. image_array, frames_array: its generated image and video, if they came in
    an npz. Raises ValueError if it is not valid."""
    if not isinstance(row, dict):
        raise ValueError(f"sample {number} is not a JSON object")
    unknown = row.keys() - _PROMPT.keys() - _SAMPLE.keys() - {"images", "image", "videos", "frames"}
    if unknown:
        raise ValueError(f"sample {number} has unknown keys {', '.join(sorted(unknown))}")
    for key, kind in (_PROMPT | _SAMPLE).items():
        if key in row and not isinstance(row[key], kind):
            raise ValueError(f"sample {number}: {key} must be of type {kind.__name__}, not {type(row[key]).__name__}")
    fields = {"id": str(number), "text": ""} | {key: row[key] for key in _PROMPT if key in row}
    images = tuple(_image(text, number) for text in row.get("images", []))
    prompt = Prompt(images=images, videos=tuple(_video(video, number) for video in row.get("videos", [])), **fields)
    image = None if image_array is None else _pixels(image_array, number)
    if row.get("image") is not None:
        image = _pixels(np.asarray(_image(row["image"], number)), number, channels_last=True)
    frames = None if frames_array is None else torch.stack([_pixels(frame, number) for frame in frames_array])
    if row.get("frames") is not None:
        decoded = [np.asarray(_image(text, number)) for text in row["frames"]]
        frames = torch.stack([_pixels(frame, number, channels_last=True) for frame in decoded])
    return Sample(prompt, image=image, frames=frames, **{key: row[key] for key in _SAMPLE if key in row})


def _video(video: object, number: int) -> Video:
    """Decodes a video of a prompt. Raises ValueError, which names the sample's number."""
    if not isinstance(video, dict) or not isinstance(video.get("fps"), int | float) or not video.get("frames"):
        raise ValueError(f"sample {number}: a video must have frames and fps")
    return Video(tuple(_image(text, number) for text in video["frames"]), video["fps"])


def _image(text: Any, number: int) -> Image.Image:
    """Decodes a PNG in base64. Raises ValueError, which names the sample's number."""
    try:
        image = Image.open(io.BytesIO(base64.b64decode(text, validate=True)), formats=["PNG"])
        image.load()
    except (OSError, SyntaxError, TypeError, binascii.Error, Image.DecompressionBombError) as error:
        raise ValueError(f"sample {number}: not an image in base64 PNG: {error}") from None
    return image


def _pixels(array: np.ndarray, number: int, *, channels_last: bool = False) -> Tensor:
    """Converts an array [channel, height, width], or with `channels_last` [height, width, channel], to an image
    [channel, height, width] fp32; uint8 is divided by 255. number: the sample's, for messages. Raises ValueError for
    other arrays."""
    if channels_last:
        array = array[None] if array.ndim == 2 else np.moveaxis(array, -1, 0)
    if array.ndim != 3 or array.shape[0] not in (1, 3) or array.dtype not in (np.uint8, np.float32):
        raise ValueError(
            f"sample {number}: image is {array.dtype} {list(array.shape)}, not uint8 or float32 [1 or 3, height, width]"
        )
    return torch.tensor(array).float() / (255 if array.dtype == np.uint8 else 1)


def _to_bytes(image: Tensor) -> Tensor:
    """Converts pixels of 0..1 to uint8, clamped and rounded."""
    return (image.clamp(0, 1) * 255).round().to(torch.uint8)


def _to_pil_same_channels(image: Tensor) -> Image.Image:
    """Converts an image like `as_pil`, but keeps a single channel."""
    return as_pil(image).convert("L") if image.shape[0] == 1 else as_pil(image)
