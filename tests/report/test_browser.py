"""The report in headless Chromium, without a network: it draws, complains of nothing, fits, plays and sorts."""

import re

import numpy as np
import pytest
import torch

from mmrl.report.html.page import write_report
from mmrl.report.records import read_run
from mmrl.report.run import write_samples
from mmrl.rollouts import Episode, Prompt, Sample
from tests.report.browser import browser, needs_chromium, opened
from tests.report.made import evaluations, healthy, write_run

pytestmark = needs_chromium
INK = "getComputedStyle(document.querySelector('.figure .title')).fill"
PATHS = "[...document.querySelectorAll('path[data-metric=\"loss\"]')].map((e) => e.getAttribute('d'))"


def points(path):
    """[x, y] in pixels of what a path goes through."""
    return [[float(number) for number in pair.split(",")] for pair in re.split("[ML]", path)[1:]]


@pytest.fixture(scope="module")
def chromium():
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A report that compares three runs, one of them with images and a video."""
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
        ink = seen.page.evaluate(INK)
        assert (back, ink) == {
            "light": ("rgb(255, 255, 255)", "rgb(28, 30, 33)"),
            "dark": ("rgb(21, 23, 26)", "rgb(230, 232, 235)"),
        }[scheme]
        drawn = [points(path) for path in seen.page.evaluate(PATHS)]
        assert [len(path) for path in drawn] == [40, 9, 20]
        for number in range(2):  # steps to the right, the value upwards, both by one scale
            wanted = [[row["step"], row["loss"]][number] for row in healthy(40)]
            scale, start = np.polyfit(wanted, [point[number] for point in drawn[0]], 1)
            assert (scale > 0) == (number == 0)
            assert np.abs(scale * np.array(wanted) + start - [point[number] for point in drawn[0]]).max() < 0.02


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_can_be_read_on_a_phone(chromium, page, scheme):
    """With all that is folded: no line is cut off, the long name of a commit neither, and no text is faint."""
    with opened(chromium, page, width=400, scheme=scheme) as seen:
        seen.open_details()
        assert seen.overflow == 0 and seen.faint_text == [] and seen.broken_images == []
        assert seen.page.locator("td", has_text="d11f3dda" * 5).count() == 3
        assert seen.requests == [] and seen.complaints == []
    assert page.stat().st_size < 2e6


@pytest.mark.parametrize(("width", "columns"), [(1440, 3), (1100, 2), (420, 1)])
def test_no_row_of_figures_has_a_hole(chromium, page, width, columns):
    """Widths of the figures of a row, and the gaps of 9 pixels between them, are the width of the page."""
    script = """[...document.querySelectorAll('.figures')].map((group) => {
      const rows = {};
      for (const figure of group.children) {
        const box = figure.getBoundingClientRect();
        (rows[Math.round(box.top)] ??= []).push(box.width);
      }
      return [group.clientWidth, Object.values(rows)];
    })"""
    with opened(chromium, page, width=width) as seen:
        groups = seen.page.evaluate(script)
        assert max(len(row) for _, rows in groups for row in rows) == columns
        assert len({sum(map(len, rows)) % 3 for _, rows in groups}) == 3  # each remainder is tried
        for total, rows in groups:
            assert [sum(row) + 9 * (len(row) - 1) for row in rows] == pytest.approx([total] * len(rows), abs=0.5)


def test_episodes_are_tiles_in_the_colour_of_their_outcome(chromium, page):
    with opened(chromium, page) as seen:
        seen.page.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true })")
        tile = "document.querySelector('.tiles tr.success')"
        assert seen.page.evaluate(f"getComputedStyle({tile}).borderTopColor") == "rgb(47, 158, 68)"
        assert seen.page.evaluate(f"{tile}.querySelector('video').clientWidth") > 200
        assert seen.page.evaluate("getComputedStyle(document.querySelector('.tiles tr')).display") == "none"  # heads


def test_a_scale_says_what_is_drawn(chromium, page):
    """Where the labels of two rows of the grid stand, the line has those values."""
    with opened(chromium, page) as seen:
        seen.scroll_through()
        labels = seen.page.evaluate(
            "[...document.querySelector('[data-metric=\"loss\"]').closest('svg').querySelectorAll('text')]"
            ".filter((e) => e.getAttribute('text-anchor') === 'end')"
            ".map((e) => [e.textContent, e.getAttribute('y') - 4])"
        )
        (low, at_low), *_, (high, at_high) = [(float(text), place) for text, place in labels]
        place = {row["step"]: at_low + (row["loss"] - low) / (high - low) * (at_high - at_low) for row in healthy(40)}
        drawn = points(seen.page.evaluate(PATHS)[0])
        assert [y for _, y in drawn] == pytest.approx([place[step] for step in sorted(place)], abs=0.02)


def test_intervals_points_and_gaps(chromium, tmp_path):
    rows = healthy(6)
    rows[1]["entropy"] = rows[2]["entropy"] = rows[4]["entropy"] = float("nan")
    run = write_run(tmp_path / "run", rows, evaluations((0, 0.25), (6, 0.5)))
    with opened(chromium, write_report([read_run(run)], tmp_path / "report.html")) as seen:
        seen.scroll_through()
        group = "document.querySelector('[data-metric=\"%s\"]').parentNode.querySelectorAll('%s')"
        at = (
            f"[...{group % ('evaluation/accuracy', '.error')}].map((e) => [e.getAttribute('y1'), e.getAttribute('y2')])"
        )
        ends = [[float(y) for y in pair] for pair in seen.page.evaluate(at)]
        held = [y for _, y in points(seen.page.evaluate(PATHS.replace("loss", "evaluation/accuracy"))[0])]
        each = (held[0] - held[1]) / 0.25 * 1.96 * 0.02  # pixels of 1.96 standard errors
        assert ends == [pytest.approx([y + each, y - each], abs=0.02) for y in held]
        (path,) = seen.page.evaluate(PATHS.replace("loss", "entropy"))
        assert path.count("M") == 3 and path.count("L") == 0  # steps 1, 4 and 6, each alone
        assert seen.page.evaluate(f"{group % ('entropy', 'circle')}.length") == 3


def test_a_pointer_is_told_the_numbers_and_a_stretch_is_looked_at_alone(chromium, page):
    with opened(chromium, page) as seen:
        seen.scroll_through()
        figure = seen.page.locator("[data-figure]", has=seen.page.locator('[data-metric="loss"]'))
        figure.scroll_into_view_if_needed()
        box = figure.bounding_box()
        middle = box["y"] + 100
        seen.page.mouse.move(box["x"] + box["width"] - 13, middle)
        said = figure.locator(".tip").inner_text().splitlines()
        assert said == ["step 40", f"run0: {healthy(40)[-1]['loss']:.6g}"]
        seen.page.mouse.move(box["x"] + 61, middle)
        assert figure.locator(".tip").inner_text().splitlines()[0] == "step 1" and figure.locator(".tip").count() == 1
        seen.page.mouse.down()
        seen.page.mouse.move(box["x"] + box["width"] / 2, middle)
        seen.page.mouse.up()
        assert 15 < len(points(seen.page.evaluate(PATHS)[0])) < 25  # of 40 steps the first half
        figure.locator("svg").dblclick()
        assert len(points(seen.page.evaluate(PATHS)[0])) == 40 and seen.complaints == []


def test_a_pointer_on_one_figure_shows_the_same_step_on_all(chromium, page):
    with opened(chromium, page) as seen:
        seen.scroll_through()
        figure = seen.page.locator("[data-figure]", has=seen.page.locator('[data-metric="loss"]'))
        figure.scroll_into_view_if_needed()
        box = figure.bounding_box()
        seen.page.mouse.move(box["x"] + box["width"] - 13, box["y"] + 100)
        tips = seen.page.locator(".tip").all_inner_texts()
        assert len(tips) >= 10 and {tip.splitlines()[0] for tip in tips} >= {"step 40"}
        assert any(f"run0: {healthy(40)[-1]['entropy']:.6g}" in tip for tip in tips)


def test_axis_smoothing_and_search(chromium, page):
    with opened(chromium, page) as seen:
        seen.scroll_through()
        raw = [y for _, y in points(seen.page.evaluate(PATHS)[0])]
        seen.page.locator("#axis").select_option("rollouts")
        svg = "document.querySelector('[data-metric=\"loss\"]').closest('svg')"
        labels = f"[...{svg}.querySelectorAll('text')].map((e) => e.textContent)"
        assert "rollouts" in seen.page.evaluate(labels) and "1000" in seen.page.evaluate(labels)  # 40 steps of 32
        seen.page.locator("#axis").select_option("step")
        seen.page.locator("#smoothing").fill("0.9")
        calm = [y for _, y in points(seen.page.evaluate(PATHS)[0])]
        means, mean, total = [], 0.0, 0.0
        for row in healthy(40):
            mean, total = 0.9 * mean + 0.1 * row["loss"], 0.9 * total + 0.1
            means.append(mean / total)
        assert np.corrcoef(means, calm)[0, 1] < -0.999 and abs(np.corrcoef(raw, calm)[0, 1]) < 0.9
        seen.page.locator("#search").fill("GRAD")
        shown = seen.page.locator("[data-figure]:visible")
        assert shown.count() == 1 and shown.get_attribute("data-name") == "grad_norm"
        assert seen.complaints == [] and seen.overflow == 0


def test_the_theme_may_change_while_it_is_open(chromium, page):
    with opened(chromium, page) as seen:
        seen.scroll_through()
        seen.page.emulate_media(color_scheme="dark")
        seen.wait(f"{INK} === 'rgb(230, 232, 235)'")
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
        there = "document.querySelectorAll('path[data-run=\"%s\"]').length"
        before = [seen.page.evaluate(there % run) for run in range(3)]
        assert min(before) > 10
        seen.page.locator('.legend input[data-run="1"]').uncheck()
        assert [seen.page.evaluate(there % run) for run in range(3)] == [before[0], 0, before[2]]
        seen.page.locator('.legend input[data-run="1"]').check()
        assert seen.page.evaluate(there % 1) == before[1] and seen.complaints == []


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


def test_faint_text_is_noticed(chromium, tmp_path):
    """#767676 on white has 4.54 to 1, #777777 has 4.48; large text may have 3, and opacity and layers count."""
    page = tmp_path / "page.html"
    page.write_text(
        "<body style='background:#fff;color:#000'><p style='color:#767676'>enough<p style='color:#777777'>grey"
        "<p style='color:#777777;font-size:24px'>large<p style='opacity:.5'>half"
        "<div style='background:rgba(0,0,0,.5)'><p style='color:#fff'>over</div><p style='display:none;color:#fff'>no"
    )
    with opened(chromium, page) as seen:
        assert seen.faint_text == ["grey: 4.48", "half: 3.98", "over: 3.98"]


def test_a_report_of_an_empty_folder_opens(chromium, tmp_path):
    (tmp_path / "run").mkdir()
    page = write_report([read_run(tmp_path / "run")], tmp_path / "report.html")
    with opened(chromium, page, width=420) as seen:
        assert "It has not logged anything." in seen.page.inner_text("#what")
        assert seen.complaints == [] and seen.overflow == 0
