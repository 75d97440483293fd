"""The page of a check: alarms, and prompts with images, text and marks as the model and the rewards have them."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from mmrl.preflight.alarms import Findings
from mmrl.preflight.golds import Marks
from mmrl.rollouts import Prompt

FOLDER = Path(__file__).parent / "templates"


@dataclass
class Row:
    """One prompt of the page. text: as the chat template renders it; marks: by component."""

    prompt: Prompt
    text: str
    marks: Mapping[str, Marks] = field(default_factory=dict)

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
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def write_page(target: Path, name: str, findings: Findings, rows: Sequence[Row]) -> None:
    """Writes one self-contained HTML file. Raises OSError where it cannot."""
    import jinja2

    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(FOLDER), autoescape=True)
    text = environment.get_template("check.html.jinja").render(name=name, findings=findings, rows=rows)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
