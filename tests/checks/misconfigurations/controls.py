"""Sound inputs of the shapes that the cases have: none may raise an alarm."""

from __future__ import annotations

import json
from pathlib import Path

from PIL import Image, ImageDraw

from tests.checks.misconfigurations import generation, questions, robots
from tests.checks.misconfigurations.parts import SIDE, Case, Written, write_lines


def marks_of_windows(folder: Path) -> Written:
    """A byte order mark, CRLF and blank lines change nothing."""
    made = questions.written(folder)
    path = folder / "train.jsonl"
    lines = path.read_text().splitlines()
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*lines[:5], "", *lines[5:], "", ""]).encode())
    return made


def options_counted_from_zero(folder: Path) -> Written:
    def change(one: questions.Row, place: int) -> questions.Row:
        return one | {"options": list(questions.OPTIONS), "answer": questions.OPTIONS.index(one["answer"])}

    data = {"task": {"data": {"options_field": "options"}}}
    return questions.written(folder, change, questions.with_reward("multiple_choice"), data, both=True)


def black_strokes_without_a_ground(folder: Path) -> Written:
    """Black on transparent is black on white, as viewers show it."""
    made = questions.written(folder)
    for number in (2, 3):
        drawing = Image.new("RGBA", (SIDE, SIDE), (0, 0, 0, 0))
        ImageDraw.Draw(drawing).ellipse((8, 8, 20 + number, 24), outline=(0, 0, 0, 255), width=3)
        drawing.save(folder / "images" / f"{number}.png")
    return made


def system_role_taken(folder: Path) -> Written:
    return questions.written(folder, None, {"task": {"system": "Answer with one word."}})


def ocr_prompts(folder: Path) -> Written:
    made = generation.written(folder, "ocr_prompts", {"task": {"data": {"format": "ocr"}}})
    write_lines(folder / "train.txt", [f'a sign "{n}"' for n in range(1, 13)])
    write_lines(folder / "eval.txt", [f'a sign "{n}"' for n in range(13, 21)])
    return made


WIDE = """
class Own(Base):
    action_space = Box(-90, 90, (2,), np.float32)

    def step(self, action):
        return super().step(np.asarray(action) / 90)
"""


def degrees_with_statistics(folder: Path) -> Written:
    """Actions in degrees, and statistics that say so."""
    root = robots.write_demonstrations(folder / "demonstrations", scale=80.0)
    path = folder / "dataset_statistics.json"
    path.write_text(json.dumps({"own": robots.quantiles(-80.0, 80.0)}))
    made = robots.supervised(folder, "degrees_with_statistics", root, {"action": {"statistics": str(path)}})
    robots.base(folder, "degrees_with_statistics", WIDE)
    return made


CONTROLS = (
    Case("plain_questions", "questions", questions.written, severity="sound"),
    Case("marks_of_windows", "questions", marks_of_windows, severity="sound"),
    Case("options_counted_from_zero", "questions", options_counted_from_zero, severity="sound"),
    Case("comma_in_quotes", "questions", lambda folder: questions.table(folder, quoted=True), severity="sound"),
    Case(
        "box_in_the_frame_of_the_viewer",
        "questions",
        lambda folder: questions.photographs(folder, upright=True),
        severity="sound",
    ),
    Case("black_strokes_without_a_ground", "questions", black_strokes_without_a_ground, severity="sound"),
    Case("system_role_taken", "questions", system_role_taken, severity="sound"),
    Case("plain_prompts", "generation", generation.changed("plain_prompts"), severity="sound"),
    Case("ocr_prompts", "generation", ocr_prompts, severity="sound"),
    Case(
        "frames_that_the_vae_takes",
        "generation",
        lambda folder: generation.videos(folder, "frames_that_the_vae_takes", 5),
        severity="sound",
    ),
    Case("plain_environment", "robots", robots.environment("plain_environment"), severity="sound"),
    Case("plain_demonstrations", "robots", robots.demonstrations("plain_demonstrations"), severity="sound"),
    Case("degrees_with_statistics", "robots", degrees_with_statistics, severity="sound"),
)
