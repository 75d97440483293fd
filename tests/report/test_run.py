"""What a run directory says and shows, and that resuming leaves no line twice."""

import base64
import io
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mmrl.report.run import Run, grid, picture, sample_table
from mmrl.rollouts import Prompt, Sample


def sample(text="how many?", response="2", answer="2", images=()):
    return Sample(Prompt("id", text, images, answer), response, 1, False, 4)


def steps(run):
    return [json.loads(line)["step"] for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "run", "seed: 1\n", writes=True)
    yield run
    run.close()


def test_the_table_escapes_everything_that_came_from_outside():
    evil = "<script>alert('x')</script>&"
    page = sample_table([sample(evil, evil, evil)], {"<b>": [1.0]})
    assert "<script" not in page and "<b>" not in page
    assert page.count("&lt;script&gt;") == 3 and page.count("&amp;</pre>") == 3 and "<th>&lt;b&gt;</th>" in page


def test_the_table_holds_the_pictures_themselves():
    pixels = np.random.default_rng(0).integers(0, 256, (2, 5, 7, 3), dtype=np.uint8)
    page = sample_table([sample(images=tuple(map(Image.fromarray, pixels))), sample()], {})
    urls = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    decoded = [np.asarray(Image.open(io.BytesIO(base64.b64decode(url)))) for url in urls]
    assert np.array_equal(decoded, pixels)
    assert "http" not in page  # self-contained


def test_the_table_puts_each_number_in_its_row():
    page = sample_table([sample(response="first"), sample(response="second")], {"reward": [0.25, float("nan")]})
    rows = page.split("<tr>")[2:]
    assert "first" in rows[0] and "<td>0.25</td>" in rows[0]
    assert "second" in rows[1] and "<td>nan</td>" in rows[1]


def test_metrics_go_to_the_file_and_to_tensorboard(run):
    run.log(1, {"loss": 0.5, "accuracy": 0.25})
    run.log(2, {"loss": 0.125})
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]  # before it is closed
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 0.5), (2, 0.125)] and rows[0]["accuracy"] == 0.25
    run.close()
    board = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("loss")] == [(1, 0.5), (2, 0.125)]


def test_forget_after_drops_later_steps_and_goes_on(run):
    for step in range(5):
        run.log(step, {"loss": float(step)})
    run.forget_after(2)
    assert steps(run) == [0, 1, 2]
    run.log(3, {"loss": 9.0})
    assert steps(run) == [0, 1, 2, 3]
    assert sorted(p.name for p in run.folder.iterdir()) == [
        "config.yaml",
        "metrics.jsonl",
        "tensorboard",
        "versions.json",
    ]


def test_forget_after_drops_a_line_torn_by_a_kill(run):
    run.log(1, {"loss": 1.0})
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    run.forget_after(1)
    run.log(2, {"loss": 2.0})
    assert steps(run) == [1, 2]


def test_a_later_run_in_the_folder_keeps_the_metrics(run):
    run.log(1, {"loss": 1.0})
    run.close()
    again = Run(run.folder, "seed: 2\n", writes=True)
    again.log(2, {"loss": 1.0})
    again.close()
    assert steps(again) == [1, 2] and (again.folder / "config.yaml").read_text() == "seed: 2\n"


def test_other_ranks_write_nothing(tmp_path, capfd):
    other = Run(tmp_path / "run", "", writes=False)
    other.log(1, {"loss": 1.0})
    other.samples("x", [sample()], {})
    other.line("hello")
    other.forget_after(0)
    other.close()
    assert list(tmp_path.iterdir()) == [] and capfd.readouterr().out == ""


def test_drawn_pictures_are_shown_clamped_and_enlarged_by_whole_pixels():
    image = torch.zeros(3, 2, 2)
    image[:, 0, 0], image[:, 0, 1] = torch.tensor([1.5, -0.5, 0.0]), torch.tensor([0.0, 1.0, 0.0])
    sheet = grid([picture(image), picture(torch.full((1, 2, 2), 1 / 3))], columns=2, least=6)
    assert sheet.size == (2 * 8, 8)
    assert sheet.getpixel((1, 1)) == (255, 0, 0) and sheet.getpixel((3, 3)) == (255, 0, 0)
    assert sheet.getpixel((4, 1)) == (0, 255, 0) and sheet.getpixel((4, 4)) == (0, 0, 0)
    assert sheet.getpixel((0, 0)) == (255, 255, 255) and sheet.getpixel((9, 1)) == (85, 85, 85)
