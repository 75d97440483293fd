"""The HTML page of `mmrl check`: alarms, and prompts with the images and text that the model reads and the scores that
rewards give to their golds (reference answers)."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from mmrl.preflight.alarms import CheckReport
from mmrl.preflight.golds import GoldScores
from mmrl.rollouts import Prompt

FOLDER = Path(__file__).parent / "templates"


@dataclass
class Row:
    """One prompt of the page. text: as the chat template renders it. scores: those of its gold, by reward."""

    prompt: Prompt
    text: str
    scores: Mapping[str, GoldScores] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return self.prompt.id

    @property
    def gold(self) -> str:
        return repr(self.prompt.answer)

    @property
    def images(self) -> list[str]:
        return [png_url(image) for image in self.prompt.images]

    @property
    def sizes(self) -> list[str]:
        return [f"{image.width} x {image.height}" for image in self.prompt.images]


def png_url(image: Image.Image) -> str:
    """Returns a data URL with the image as PNG."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def write_page(target: Path, name: str, report: CheckReport, rows: Sequence[Row]) -> None:
    """Writes the page as one self-contained HTML file. name: the configuration's name. Raises OSError if it cannot be
    written."""
    import jinja2

    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(FOLDER), autoescape=True)
    text = environment.get_template("check.html.jinja").render(name=name, report=report, rows=rows)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
