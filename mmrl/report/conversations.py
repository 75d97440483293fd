"""Renders conversations for tables of samples: every turn with its images, the boxes of tools, and its reward."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from PIL import Image, ImageDraw

from mmrl.rollouts import Conversation, Message, Video

ROLE = '<b class="role">{}</b>'


def conversation_html(conversation: Conversation) -> str:
    """Returns a conversation as HTML. If a turn's facts have a box (x0, y0, x1, y1 in 0 .. 1), it is drawn into the
    image with the index facts["image"]."""
    boxes: dict[int, list[list[float]]] = {}
    for turn in conversation.turns:
        if "box" in turn.facts:
            boxes.setdefault(int(turn.facts.get("image", 0)), []).append(list(turn.facts["box"]))
    image_numbers = iter(range(1_000_000))  # indices of images in the order in which the policy saw them
    parts = [_message_html(message, boxes, image_numbers) for message in conversation.messages]
    for turn in conversation.turns:
        parts.append(f"{ROLE.format('response')} <pre>{html.escape(turn.response)}</pre>")
        parts.append(_outcome(turn.reward, turn.tool, turn.error))
        parts += [_message_html(message, boxes, image_numbers) for message in turn.observation]
    problem = f": {html.escape(conversation.problem)}" if conversation.problem else ""
    parts.append(f"<i>ended by {html.escape(conversation.end)}{problem}</i>")
    return "".join(f"<div>{part}</div>" for part in parts if part)


def _message_html(message: Message, boxes: dict[int, list[list[float]]], image_numbers: Iterator[int]) -> str:
    """Returns the HTML of a message. boxes: to draw, by index of the image. image_numbers: yields the indices of the
    conversation's images."""
    elements = []
    for part in message.parts:
        if isinstance(part, str):
            elements.append(f"<pre>{html.escape(part)}</pre>")
        elif isinstance(part, Video):
            elements.append(f'<img src="{film_url(part.frames, round(1000 / part.fps))}">')
        else:
            elements.append(f'<img src="{data_url(with_boxes(part, boxes.get(next(image_numbers), [])))}">')
    return f"{ROLE.format(html.escape(message.role))} {''.join(elements)}"


def _outcome(reward: float, tool: str | None, error: str | None) -> str:
    """Returns a line with the tool that a response called, its error and its reward; "" if there is none of them."""
    parts = [f"tool {tool}"] if tool else []
    parts += [f"error: {error}"] if error else []
    parts += [f"reward {reward:.3g}"] if reward else []
    return f"<i>{html.escape('; '.join(parts))}</i>" if parts else ""


def with_boxes(image: Image.Image, boxes: list[list[float]]) -> Image.Image:
    """Returns a copy, enlarged where it is small, with `boxes` (x0, y0, x1, y1 from 0 to 1) drawn into it."""
    if not boxes:
        return image
    scale = max(1, -(-96 // max(1, min(image.size))))  # makes the shorter side at least 96 pixels long
    width, height = image.width * scale, image.height * scale
    canvas = image.convert("RGB").resize((width, height), Image.Resampling.NEAREST)
    pen = ImageDraw.Draw(canvas)
    for x0, y0, x1, y1 in boxes:
        pen.rectangle((x0 * width, y0 * height, x1 * width - 1, y1 * height - 1), outline="red", width=2)
    return canvas


def data_url(image: Image.Image) -> str:
    """Returns a data URL with the image as PNG."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def save_film(target: Path | IO[bytes], sheets: Sequence[Image.Image], milliseconds: int = 250) -> None:
    """Writes an animated GIF that repeats. Its last frame is shown three times as long, to mark the end."""
    times = [milliseconds] * (len(sheets) - 1) + [3 * milliseconds]
    first, *others = (sheet.convert("RGB") for sheet in sheets)
    first.save(target, format="GIF", save_all=True, append_images=others, duration=times, loop=0)


def film_url(sheets: Sequence[Image.Image], milliseconds: int = 250) -> str:
    """Returns a data URL with the frames as an animated GIF. milliseconds: for each frame."""
    buffer = io.BytesIO()
    save_film(buffer, sheets, milliseconds)
    return "data:image/gif;base64," + base64.b64encode(buffer.getvalue()).decode()
