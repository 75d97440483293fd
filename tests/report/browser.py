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

    @property
    def overflow(self) -> int:
        """By how many pixels the page is wider than the window."""
        root = "document.documentElement"
        return self.page.evaluate(f"document.body.scrollWidth - {root}.clientWidth")


@contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as tools:
        started = tools.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


@contextmanager
def opened(started: Any, path: Path, *, width: int = 1300, scheme: str = "light") -> Iterator[Opened]:
    """The file at `path` in a window of its own, of a browser that has no network."""
    context = started.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    found = Opened(context.new_page())
    own = path.resolve().as_uri()

    def note(asked: Any) -> None:
        if not asked.url.startswith((own, "data:", "blob:")):
            found.requests.append(asked.url)

    found.page.on("request", note)
    found.page.on("console", lambda said: found.complaints.append(f"{said.type}: {said.text}"))
    found.page.on("pageerror", lambda error: found.complaints.append(str(error)))
    found.page.goto(own)
    yield found
    context.close()
