"""A page in headless Chromium: what it asked of the network, what it complained of, and how it looks."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
# WCAG 2.2, success criterion 1.4.3: 4.5 to 1, or 3 to 1 for text of 24 pixels, or of 18.66 in bold. The background is
# that of the ancestors, one over the other; the opacity of all of them counts.
CONTRAST = """() => {
  const channels = (color) => {
    const found = color.match(/^rgba?\\(([^)]+)\\)$/);
    if (!found) throw new Error(`a color that is not understood: ${color}`);
    const numbers = found[1].split(/[ ,/]+/).map(Number);
    return numbers.length > 3 ? numbers : [...numbers, 1];
  };
  const over = (front, back) => [0, 1, 2].map((i) => front[i] * front[3] + back[i] * (1 - front[3]));
  const luminance = (color) => {
    const [r, g, b] = color.map((v) => (v / 255 <= 0.04045 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const background = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) layers.push(channels(getComputedStyle(e).backgroundColor));
    return layers.reverse().reduce((back, front) => over(front, back), [255, 255, 255]);
  };
  const faint = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode, element = text.parentElement, range = document.createRange();
    range.selectNodeContents(text);
    const box = range.getBoundingClientRect();
    const seen = element.checkVisibility({ opacityProperty: true, visibilityProperty: true });
    if (!text.textContent.trim() || !seen || !box.width || !box.height) continue;
    const style = getComputedStyle(element), size = parseFloat(style.fontSize);
    const ink = channels(element.closest("svg") ? style.fill : style.color), back = background(element);
    for (let e = element; e; e = e.parentElement) ink[3] *= getComputedStyle(e).opacity;
    const [light, dark] = [luminance(over(ink, back)), luminance(back)].sort((a, b) => b - a);
    const ratio = (light + 0.05) / (dark + 0.05);
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5)) faint.push(`${text.textContent.trim().slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return faint;
}"""


@dataclass
class Opened:
    """A page that is open. requests: all addresses but the file's own and data in it; complaints: of the console."""

    page: Any
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def scroll_through(self) -> None:
        """To the end and back, so that everything is drawn that is drawn when it comes into sight."""
        height = self.page.evaluate("document.body.scrollHeight")
        for place in range(0, height, 500):
            self.page.evaluate(f"window.scrollTo(0, {place})")
            self.page.wait_for_timeout(30)
        waiting = "[...document.querySelectorAll('[data-figure]')].every((e) => e.querySelector('svg'))"
        self.wait(waiting)
        self.page.evaluate("window.scrollTo(0, 0)")

    def wait(self, expression: str, seconds: float = 20.0) -> None:
        """Until an expression is true; the page's policy forbids the polling of Playwright's own."""
        end = time.monotonic() + seconds
        while not self.page.evaluate(expression):
            assert time.monotonic() < end, f"it never became true: {expression}"
            self.page.wait_for_timeout(50)

    def open_details(self) -> None:
        """Everything that is folded, and then everything that is drawn when it comes into sight."""
        self.page.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true })")
        self.scroll_through()

    @property
    def overflow(self) -> int:
        """By how many pixels the page is wider than the window."""
        root = "document.documentElement"
        return self.page.evaluate(f"Math.max(document.body.scrollWidth, {root}.scrollWidth) - {root}.clientWidth")

    @property
    def faint_text(self) -> list[str]:
        """Visible texts with less contrast than `CONTRAST` asks for: the first letters, and the ratio."""
        return self.page.evaluate(CONTRAST)

    @property
    def broken_images(self) -> list[str]:
        script = "[...document.images].filter((i) => i.complete && !i.naturalWidth).map((i) => i.src.slice(0, 80))"
        return self.page.evaluate(script)


@contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as tools:
        started = tools.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


@contextmanager
def opened(started: Any, path: Path | str, *, width: int = 1300, scheme: str = "light") -> Iterator[Opened]:
    """The file at `path` in a window of its own, of a browser that has no network; or the page of an address of this
    host, which may ask for others of the same host."""
    local = isinstance(path, str)
    context = started.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=not local)
    found = Opened(context.new_page())
    address = path if isinstance(path, str) else path.resolve().as_uri()
    own = "/".join(address.split("/")[:3]) + "/" if local else address

    def note(asked: Any) -> None:
        if not asked.url.startswith((own, "data:", "blob:")):
            found.requests.append(asked.url)

    found.page.on("request", note)
    found.page.on("console", lambda said: found.complaints.append(f"{said.type}: {said.text}"))
    found.page.on("pageerror", lambda error: found.complaints.append(str(error)))
    found.page.goto(address)
    yield found
    context.close()
