"""Says when a call takes very long that nothing in this process can end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


@contextmanager
def watched(name: str, what: str, limit_s: float | None) -> Iterator[None]:
    """Logs a warning if what it encloses takes longer than `limit_s` seconds; None: nobody wants to know."""
    if limit_s is None:
        yield
        return
    timer = threading.Timer(limit_s, _tell, (name, what, limit_s))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _tell(name: str, what: str, limit_s: float) -> None:
    log.warning(
        "simulator %s: a %s takes longer than %g s; it runs in the trainer's process, where nothing can end it: with "
        "task.workers=1 or more it would be replaced by now",
        name,
        what,
        limit_s,
    )
