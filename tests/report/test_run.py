"""What a run directory says and shows, and that resuming leaves no line twice."""

import base64
import errno
import io
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import imageio.v3
import numpy as np
import pytest
import torch
from PIL import Image

import mmrl
from mmrl.errors import UserError
from mmrl.report.run import (
    Run,
    commit_of,
    grid,
    group_size,
    pil_image,
    sample_table,
    versions,
    write_episode_video,
    write_samples,
)
from mmrl.rollouts import Episode, Prompt, Sample


def sample(text="how many?", response="2", answer="2", images=()):
    return Sample(Prompt("id", text, images, answer=answer), response, 1, False, 4)


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


def test_the_table_has_no_column_that_would_be_empty():
    pixels = Image.fromarray(np.zeros((5, 7, 3), np.uint8))
    with_answer, with_image = sample("draw"), sample("draw", answer=None, images=(pixels,))
    neither = sample("draw", answer=None)
    heads = [
        re.findall("<th>(.*?)</th>", sample_table([s], {"reward": [1.0]})) for s in (neither, with_answer, with_image)
    ]
    rest = ["response", "reward"]
    assert heads == [["prompt", *rest], ["prompt", "answer", *rest], ["images", "prompt", *rest]]
    assert (
        sample_table([neither], {}).count("<td") == 2 and sample_table([neither, sample("write")], {}).count("<td") == 6
    )


def test_the_table_holds_the_images_themselves():
    pixels = np.random.default_rng(0).integers(0, 256, (2, 5, 7, 3), dtype=np.uint8)
    page = sample_table([sample(images=tuple(map(Image.fromarray, pixels))), sample()], {})
    urls = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    decoded = [np.asarray(Image.open(io.BytesIO(base64.b64decode(url)))) for url in urls]
    assert np.array_equal(decoded, pixels)
    assert "http" not in page  # self-contained


def test_the_table_puts_each_number_in_its_row():
    page = sample_table([sample(response="first"), sample(response="second")], {"reward": [0.25, float("nan")]})
    rows = page.split("<tr>")[2:]
    assert "first" in rows[0] and '<td data-name="reward">0.25</td>' in rows[0]
    assert "second" in rows[1] and '<td data-name="reward">nan</td>' in rows[1]


def test_a_table_with_videos_has_a_tile_with_prompt_and_outcome_for_each_episode():
    """Of two episodes from one start each has the instruction in its tile; the third has no video."""
    outcomes = ((True, False), (False, False), (False, True))
    episodes = [Episode("push it", success, False, 5, 0.0, lost=lost) for success, lost in outcomes]
    samples = [Sample(Prompt("a", "start 3"), episode=episode) for episode in episodes]
    page = sample_table(samples, {"accuracy": [1.0, 0.0, 0.0]}, {0: "f-000.mp4", 1: "f-001.mp4"})
    assert re.findall(r'<tr class="(\w+)">', page) == ["success", "failure", "lost"] and '<table class="tiles">' in page
    tiles = page.split("<tr class=")[1:]
    assert all("push it" in tile for tile in tiles) and "rowspan" not in page
    assert [re.findall('video src="(.*?)"', tile) for tile in tiles] == [["f-000.mp4"], ["f-001.mp4"], []]
    plain = sample_table(samples, {})
    assert 'rowspan="3"' in plain and "tiles" not in plain.partition("</style>")[2]


def test_metrics_go_to_the_file_at_once(run):
    run.log(1, {"loss": 0.5, "accuracy": 0.25})
    run.log(2, {"loss": 0.125})
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]  # before it is closed
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 0.5), (2, 0.125)] and rows[0]["accuracy"] == 0.25


def test_versions_name_the_commit_and_only_what_is_installed(tmp_path):
    found = versions()
    assert found["mmrl"] == mmrl.__version__ and found["torch"] == torch.__version__.partition("+")[0]
    assert {"transformers", "numpy", "python", "machine"} <= found.keys() and "metaworld-not-there" not in found
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=b"]
    assert commit_of(tmp_path) is None
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "file").write_text("one")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "first"], check=True)
    subprocess.run([*git, "tag", "v1"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert commit_of(tmp_path) == head
    (tmp_path / "file").write_text("two")
    assert commit_of(tmp_path) == f"{head}-dirty"


def test_forget_after_drops_later_steps_and_goes_on(run):
    for step in range(5):
        run.log(step, {"loss": float(step)})
    run.drop_after(2)
    assert steps(run) == [0, 1, 2]
    run.log(3, {"loss": 9.0})
    assert steps(run) == [0, 1, 2, 3]
    assert sorted(p.name for p in run.folder.iterdir()) == [
        "config.yaml",
        "metrics.jsonl",
        "run.lock",
        "versions.json",
    ]


def test_forget_after_drops_a_line_torn_by_a_kill(run):
    run.log(1, {"loss": 1.0})
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    run.drop_after(1)
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
    other.samples("train", 1, [sample()], {})
    other.line("hello")
    other.drop_after(0)
    other.close()
    assert list(tmp_path.iterdir()) == [] and capfd.readouterr().out == ""


def test_drawn_images_are_shown_clamped_and_enlarged_by_whole_pixels():
    image = torch.zeros(3, 2, 2)
    image[:, 0, 0], image[:, 0, 1] = torch.tensor([1.5, -0.5, 0.0]), torch.tensor([0.0, 1.0, 0.0])
    sheet = grid([pil_image(image), pil_image(torch.full((1, 2, 2), 1 / 3))], columns=2, min_width=6)
    assert sheet.size == (2 * 8, 8)
    assert sheet.getpixel((1, 1)) == (255, 0, 0) and sheet.getpixel((3, 3)) == (255, 0, 0)
    assert sheet.getpixel((4, 1)) == (0, 255, 0) and sheet.getpixel((4, 4)) == (0, 0, 0)
    assert sheet.getpixel((0, 0)) == (255, 255, 255) and sheet.getpixel((9, 1)) == (85, 85, 85)


def test_images_of_a_group_stand_in_a_row():
    prompts = [Prompt(str(i), f"draw {i}") for i in (0, 0, 0, 1, 1, 1)]
    assert group_size(prompts) == 3 and group_size(prompts[:5]) is None and group_size(prompts[::3]) is None
    assert group_size([prompts[0]] * 16) == 16 and group_size([prompts[0]] * 17) is None


def test_a_sheet_has_a_row_for_each_group(tmp_path):
    drawn = [Sample(Prompt(str(i // 3), f"draw {i // 3}"), image=torch.full((3, 48, 48), i / 6)) for i in range(6)]
    sheet = Image.open(write_samples(tmp_path / "s" / "train-000001.html", drawn, {})[1])
    assert sheet.size == (3 * 50, 2 * 50)
    shades = [sheet.getpixel((50 * column + 25, 50 * row + 25))[0] for row in range(2) for column in range(3)]
    assert shades == [round(255 * i / 6) for i in range(6)]
    moving = [replace(s, image=None, frames=s.image.expand(2, 3, 48, 48)) for s in drawn]
    gif, _ = map(Image.open, write_samples(tmp_path / "s" / "train-000002.html", moving, {})[1:])
    assert gif.size == (3 * 50, 2 * 50)


def test_a_film_of_looks_takes_as_long_as_one_of_actions(tmp_path):
    """Nine frames of eight actions play at 20 a second; three, which follow four actions each, at 5."""
    for count, per_second, numbers in ((9, 20, range(9)), (3, 5, (0, 4, 8))):
        frames = np.zeros((count, 16, 16, 3), np.uint8)
        path = write_episode_video(tmp_path / f"{count}.mp4", Episode("reach", True, True, 8, 1.0, frames=frames))
        assert imageio.v3.immeta(path)["fps"] == per_second
        shown = imageio.v3.imread(path)
        assert len(shown) == count + per_second // 2
        by_action = imageio.v3.imread(tmp_path / "9.mp4")
        written = [page[16:32, :16].astype(int) for page in by_action[:9]]  # 0 to 8
        for place, number in enumerate(numbers):
            unlike = [np.abs(shown[place, 16:32, :16] - digit).mean() for digit in written]
            assert int(np.argmin(unlike)) == number


def test_the_table_names_the_videos_beside_it(tmp_path):
    frames = np.zeros((2, 16, 16, 3), np.uint8)
    filmed = Sample(Prompt("a", "start"), episode=Episode("reach", True, True, 1, 1.0, frames=frames))
    plain = Sample(Prompt("b", "start"), episode=Episode("reach", False, False, 1, 0.0))
    page, video = write_samples(tmp_path / "s" / "train-000050.html", [plain, filmed], {})
    rows = page.read_text().split("<tr ")[1:]
    assert [f'<video src="{video.name}"' in row for row in rows] == [False, True] and video.name.endswith("-001.mp4")


def test_an_episode_becomes_a_video(tmp_path):
    frames = np.zeros((3, 16, 16, 3), np.uint8)
    frames[1, :, :, 0] = 255
    episode = Episode("reach for it", True, True, 2, 1.0, frames=frames)
    written = write_samples(tmp_path / "s" / "samples.html", [Sample(Prompt("a", "start"), episode=episode)], {})
    assert [path.name for path in written] == ["samples.html", "samples-000.mp4"]
    assert "reach for it" in written[0].read_text()
    shown = imageio.v3.imread(written[1])
    assert shown.shape == (3 + 10, 256 + 32, 256, 3)
    assert shown[1, 32:, :, 0].mean() > 200 and shown[0, 32:].mean() < 10
    assert (shown[-1, :30] > 100).any() and not (shown[-1, :30] > 100).all()  # something is written above


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="writes to the device that is always full")
def test_a_full_disk_ends_the_run_in_one_line(run, capsys):
    """The metrics of a step; closing afterwards hides nothing."""
    usual, run._metrics = run._metrics, open("/dev/full", "a", buffering=1)  # noqa: SIM115
    usual.close()
    with pytest.raises(UserError, match=r"cannot be written: .*No space left.*the same command continues") as caught:
        run.log(1, {"loss": 0.0})
    assert "\n" not in str(caught.value)
    run.close()


def test_a_disk_that_is_full_when_metrics_are_flushed_ends_the_run_in_one_line(run, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"cannot be written: .*No space left"):
        run.sync()


@pytest.mark.parametrize("act", ["samples", "skipped_update", "end", "sync"])
def test_a_run_directory_that_is_gone_is_one_line(run, act, capsys, monkeypatch):
    shutil.rmtree(run.folder)
    if act == "end":  # an error here would hide the one that ended the run
        run.end("failed", "why")
        assert "how the run ended is not recorded: " in capsys.readouterr().out
    elif act == "sync":  # the file is open still: nothing can be seen yet
        run.sync()
    else:
        monkeypatch.setattr(Path, "mkdir", lambda path, **options: path.stat())  # of a file system that is read-only
        with pytest.raises(UserError, match=f"run_dir={run.folder} cannot be written"):
            run.samples("train", 1, [sample()], {}) if act == "samples" else run.skipped_update(1, 0, [])
