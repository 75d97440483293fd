"""The report in headless Chromium, without a network: it draws, complains of nothing, fits, plays and sorts."""

import numpy as np
import pytest
import torch

from mmrl.report.page import write_report
from mmrl.report.records import read_run
from mmrl.report.run import write_samples
from mmrl.rollouts import Episode, Prompt, Sample
from tests.report.browser import browser, needs_chromium, opened
from tests.report.made import evaluations, healthy, write_run

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def chromium():
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A report that compares three runs, one of them with pictures and a video."""
    folder = tmp_path_factory.mktemp("report")
    runs = [
        write_run(folder / f"run{i}", healthy(steps), evaluations((0, 0.2), (steps, last)))
        for i, (steps, last) in enumerate(((40, 0.6), (9, 0.9), (20, 0.3)))
    ]
    for step in (0, 40):
        samples = [Sample(Prompt("a", "draw"), image=torch.rand(3, 8, 8))]
        write_samples(runs[0] / "samples" / f"evaluation-{step:06d}.html", samples, {"accuracy": [0.5]})
    frames = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
    film = Sample(Prompt("b", "reach"), episode=Episode("reach", True, True, 20, 1.0, frames=frames))
    write_samples(runs[0] / "samples.html", [film], {})
    return write_report([read_run(run) for run in runs], folder / "report.html")


@pytest.mark.parametrize(("width", "scheme"), [(1300, "light"), (420, "dark")])
def test_it_draws_and_asks_the_network_for_nothing(chromium, page, width, scheme):
    with opened(chromium, page, width=width, scheme=scheme) as seen:
        seen.scroll_through()
        assert seen.requests == [] and seen.complaints == []
        assert seen.overflow == 0
        back = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
        ink = seen.page.evaluate("document.querySelector('.gtitle').style.fill")
        assert (back, ink) == {
            "light": ("rgb(255, 255, 255)", "rgb(28, 30, 33)"),
            "dark": ("rgb(21, 23, 26)", "rgb(230, 232, 235)"),
        }[scheme]
        # Plotly's own copy of the data, as it was logged
        drawn = seen.page.evaluate(
            "[...document.querySelectorAll('[data-figure]')].flatMap((e) => e.data)"
            ".filter((t) => t.meta && t.meta.metric === 'loss').map((t) => [t.x, t.y])"
        )
        rows = healthy(40)
        assert drawn[0] == [[row["step"] for row in rows], [row["loss"] for row in rows]]
        assert [len(x) for x, _ in drawn] == [40, 9, 20]


def test_the_theme_may_change_while_it_is_open(chromium, page):
    with opened(chromium, page) as seen:
        seen.scroll_through()
        seen.page.emulate_media(color_scheme="dark")
        seen.wait("document.querySelector('.gtitle').style.fill === 'rgb(230, 232, 235)'")
        assert seen.complaints == []


def test_the_table_sorts_by_numbers_both_ways(chromium, page):
    with opened(chromium, page) as seen:

        def order():
            return seen.page.locator("#results tbody tr td:first-child").all_inner_texts()

        head = seen.page.locator("#results th", has_text="steps")
        head.click()
        assert order() == ["run1", "run2", "run0"]  # 9, 20, 40: as text 40 would come before 9
        head.click()
        assert order() == ["run0", "run2", "run1"]
        seen.page.locator("#results th", has_text="evaluation/accuracy, last").click()
        assert order() == ["run2", "run0", "run1"]


def test_the_legend_hides_a_run_everywhere(chromium, page):
    with opened(chromium, page) as seen:
        seen.scroll_through()
        visible = (
            "[...document.querySelectorAll('[data-figure]')].flatMap((e) => e.data)"
            ".filter((t) => t.meta && t.meta.run === 1).map((t) => t.visible)"
        )
        assert set(seen.page.evaluate(visible)) == {True}
        seen.page.locator('.legend input[data-run="1"]').uncheck()
        assert set(seen.page.evaluate(visible)) == {False} and seen.complaints == []


def test_videos_play(chromium, page):
    with opened(chromium, page) as seen:
        seen.page.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true })")
        ended = seen.page.evaluate(
            "(async () => { const v = document.querySelector('video'); await v.play();"
            " await new Promise((r) => setTimeout(r, 400)); return [v.currentTime, v.videoWidth, v.error] })()"
        )
        assert ended[0] > 0 and ended[1] == 256 and ended[2] is None
        broken = "[...document.querySelectorAll('img')].filter((i) => !i.complete || !i.naturalWidth).length"
        assert seen.page.evaluate(broken) == 0 and seen.complaints == []


def test_a_page_that_asks_for_something_is_noticed(chromium, tmp_path):
    """The tests above could fail."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<body style='width:3000px'><img src='http://example.com/x.png'><script>console.error('no')</script>"
    )
    with opened(chromium, bad) as seen:
        seen.page.wait_for_timeout(200)
        assert seen.requests == ["http://example.com/x.png"] and "error: no" in seen.complaints and seen.overflow > 1000


def test_a_report_of_an_empty_folder_opens(chromium, tmp_path):
    (tmp_path / "run").mkdir()
    page = write_report([read_run(tmp_path / "run")], tmp_path / "report.html")
    with opened(chromium, page, width=420) as seen:
        assert "It has not logged anything." in seen.page.inner_text("#what")
        assert seen.complaints == [] and seen.overflow == 0
