"""Reports of runs of the three kinds, from the recipes made small to the page in a browser."""

import json
import subprocess

import pytest

from tests.helpers.pages import workshop
from tests.report.browser import browser, needs_chromium, opened
from tests.report.test_report import drawn, logged

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), needs_chromium]
RUNS = {  # of recipes, below runs/
    "visual_qa_digits_warm_start": "warm_starts/vlm/visual_qa_digits_warm_start",
    "image_digits_flow": "digits/image_digits_flow",
    "manipulation_tabletop": "vla/manipulation_tabletop",
}
RECIPES = tuple(RUNS)


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A folder with a run of each recipe, of whose models samples were drawn."""
    folder = tmp_path_factory.mktemp("runs")
    environment = workshop(folder)

    def run(command):
        done = subprocess.run(["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    for folder_of in RUNS.values():
        run(f"mmrl train configs/{folder_of}.yaml log.samples_every=1")
        run(f"mmrl sample runs/{folder_of} --count 2")
        run(f"mmrl report runs/{folder_of}")
    run(f"mmrl report {' '.join(f'runs/{name}' for name in RUNS.values())}")
    return folder


@pytest.mark.parametrize("name", RECIPES)
def test_a_report_has_the_run_s_numbers_and_opens(shop, name):
    page = shop / "runs" / RUNS[name] / "report.html"
    assert page.stat().st_size < 2_000_000
    found = {metric: values for (_, metric), values in drawn(page.read_text()).items()}
    assert found == logged(page.parent) and "memory/host_gib" in found
    with browser() as chromium, opened(chromium, page, scheme="dark") as seen:
        seen.scroll_through()
        assert seen.requests == [] and seen.complaints == [] and seen.overflow == 0
        assert "It reached its end, step 2." in seen.page.inner_text("#what")
        seen.page.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true })")
        galleries = seen.page.inner_text("#galleries")
        assert "Held-out prompts" in galleries and "Written by mmrl sample" in galleries
        images, videos = (seen.page.locator(f"#galleries {kind}").count() for kind in ("img", "video"))
        assert (images > 0, videos) == {RECIPES[0]: (True, 0), RECIPES[1]: (True, 0), RECIPES[2]: (False, 2)}[name]
        if videos:
            seen.wait("[...document.querySelectorAll('video')].every((v) => v.readyState >= 2 && v.videoWidth > 0)")


def test_the_three_compared(shop):
    page = shop / "report.html"
    assert page.stat().st_size < 2_000_000
    number = {name: i for i, name in enumerate(RECIPES)}
    found = drawn(page.read_text())
    for name in RECIPES:
        mine = {metric: values for (run, metric), values in found.items() if run == number[name] and values}
        assert mine == logged(shop / "runs" / RUNS[name])
    with browser() as chromium, opened(chromium, page, width=420) as seen:
        seen.scroll_through()
        assert seen.requests == [] and seen.complaints == [] and seen.overflow == 0
    assert json.loads((shop / "runs" / RUNS[RECIPES[0]] / "end.json").read_text())["state"] == "finished"
