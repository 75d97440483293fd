"""The site: pages become Python-Markdown, every page has a place in its navigation, it builds without a warning, and
its pages can be read in a browser on a phone and on a desk, light and dark."""

import re
import shutil
import subprocess
import sys
import threading
import tomllib
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from mmrl.version import VERSION
from tests.helpers.pages import PAGES, ROOT
from tests.report.browser import browser, needs_chromium, opened

sys.path.insert(0, str(ROOT / "scripts/pages"))
import collect  # noqa: E402

MKDOCS = [sys.executable, "-m", "mkdocs", "build", "--strict"]
OPENED = (  # films and wide tables, a long table with code, keys, methods, images
    "index.html",
    "configs/coming_from.html",
    "scripts/bench/turns.html",
    "reference/keys/rollout.html",
    "reference/methods/loss_term.html",
    "tasks/visual_qa/index.html",
)


def test_a_list_after_text_gets_a_blank_line_and_nested_items_four_blanks():
    text = "Rewards:\n- one\n  goes on\n  - inner\n- two\n\n    - code\n\n```\na\n- b\n```\n"
    assert collect.python_markdown(text) == (
        "Rewards:\n\n- one\n  goes on\n    - inner\n- two\n\n    - code\n\n```\na\n- b\n```\n"
    )


def test_links_to_modules_become_names():
    text = "[a](a.md#b), ![i](i.png), [job.py](../job.py), [x](https://x.org/y.py), [c](#c)"
    assert collect.without_source_links(text) == text.replace("[job.py](../job.py)", "`job.py`")


def test_links_to_pages_of_tests_become_their_text():
    assert collect.without_source_links("[Tests](../../tests/faults/README.md) do.") == "Tests do."


def test_links_of_pages_lead_to_pages_of_the_site():
    for page in collect.pages():
        text = collect.without_source_links(page.read_text())
        for image, _, target in collect.LINK.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
            path = target.partition("#")[0]
            if not image and "://" not in target and path:
                assert (page.parent / path).resolve() in collect.pages(), (page, target)


def test_language_models_get_every_page_with_what_it_is_for():
    agents = (ROOT / "AGENTS.md").read_text()
    text = collect.llms((ROOT / "mkdocs.yml").read_text(), agents)
    entries = dict(re.findall(r"^- \[(.+?)\]\((\S+)\)(?:: .+)?$", text, flags=re.M))
    listed = re.findall(r": (\S+)\.md$", (ROOT / "mkdocs.yml").read_text(), flags=re.M)
    assert text.startswith("# mmrl\n\n> Reinforcement-learning") and len(entries) == len(listed)
    block = agents.partition("\n\n    ")[2].partition("\n\n")[0]
    assert f"\n\n    {block}\n\n" in text and block.startswith("bash scripts/setup.sh") and block.count("mmrl ") >= 4
    assert sorted(entries.values()) == sorted(collect.address(f"{page}.md") for page in listed)
    assert "- [Kernels](scripts/bench/kernels.html): " in text and "\n## Robots\n" in text
    for line in (line for line in text.splitlines() if line.startswith("- [") and "reference/" not in line):
        assert 8 < len(line.partition(".html): ")[2]) < 400, line


def test_first_sentences():
    page = "# Title\n\n[![badge](x.svg)](y)\n\n| a | b |\n\nA [word](w.md) on\ntwo lines. And more.\n"
    assert collect.first_sentence(page) == "A word on two lines."


def test_every_page_has_a_place_in_the_navigation():
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.M)
    shown = [str(page.relative_to(ROOT)) for page in collect.pages()]
    assert len(listed) == len(set(listed))
    assert set(shown) == {page for page in listed if not page.startswith("reference/")}
    tests = {page for page in PAGES if "tests" in page.relative_to(ROOT).parts}
    assert {ROOT / page for page in shown} == set(PAGES) - tests


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    collect.collect(folder / "build/site")
    shutil.copyfile(ROOT / "mkdocs.yml", folder / "mkdocs.yml")
    return folder


@pytest.fixture(scope="module")
def built(sources):
    done = subprocess.run(MKDOCS, cwd=sources, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return sources


def test_it_builds_without_a_warning(sources, built):
    kl = (sources / "build/html/reference/methods/loss_term.html").read_text()
    assert 'id="kl"' in kl and "The KL divergence from another policy" in kl
    linked = re.findall(r"^- \[.+?\]\((\S+)\)", (sources / "build/site/llms.txt").read_text(), flags=re.M)
    assert len(linked) > 40 and [page for page in linked if not (sources / "build/html" / page).is_file()] == []
    keys = (sources / "build/html/reference/keys/rollout.html").read_text()
    assert "<code>rollout.group_size</code>" in keys
    assert '<div class="keys">\n<table>' in keys  # what the style of a phone needs
    count = keys.count("<tr>\n<td>")
    assert count > 50 and f"{count} keys" in (sources / "build/html/reference/keys/index.html").read_text()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *words):
        pass


@pytest.fixture(scope="module")
def address(built):
    """Of the site's server; the search of the site does not work in files that are opened without one."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=built / "build/html"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_pages_can_be_read(address, width, scheme):
    """Nothing scrolls sideways but tables and code, no text is faint, no image is missing, and no other host is asked.
    The parts that are hidden at first, such as the navigation of a phone, count too."""
    wrong = {}
    with browser() as chromium:
        for page in OPENED:
            with opened(chromium, f"{address}/{page}", width=width, scheme=scheme) as seen:
                seen.page.wait_for_timeout(300)  # colours fade in
                found = (seen.overflow, seen.faint_text, seen.broken_images, seen.requests, seen.complaints)
                if found != (0, [], [], [], []):
                    wrong[page] = found
    assert wrong == {}


@pytest.mark.slow
def test_it_does_not_build_with_a_broken_link(sources):
    page = sources / "build/site/tasks/check.md"
    page.write_text(page.read_text() + "\n[nowhere](rewards.md#no-such-heading)\n")
    broken = subprocess.run(MKDOCS, cwd=sources, capture_output=True, text=True)
    assert broken.returncode != 0 and "no-such-heading" in broken.stderr


def test_what_is_cited_is_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == VERSION and citation["cff-version"] == "1.2.0"
    released = dict(re.findall(r"^## (\S+) \((\d+ \w+ \d{4})\)", (ROOT / "CHANGELOG.md").read_text(), flags=re.M))
    assert f"{citation['date-released']:%-d %B %Y}" == released[VERSION] == next(iter(released.values()))
    license_name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"]
    assert citation["license"] == license_name
    badges = re.findall(r"<text [^>]*>(.*?)</text>", (ROOT / "scripts/readme/badges.svg").read_text())
    assert badges[:2] == ["mmrl", VERSION] and badges[5] == license_name
