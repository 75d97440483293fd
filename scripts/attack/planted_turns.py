"""Faults of tools, of conversations from files and of environments of other packages: a name, a file, a text that it
holds once, what takes its place, and the tests that could notice. `faults.py` plants them with `planted.py`'s."""

from __future__ import annotations

TOOLS = ("sims/test_tools.py",)
P, S = "sims/turns/pictures.py", "sims/turns/settings.py"

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("ocr tool: reads the whole picture", P, "fitted(_part(whole, box), pixels)", "fitted(whole, pixels)", TOOLS),
    ("ocr tool: reads what is shown, not the original", P,
     "whole = scene.picture(picture)\n        given", "whole = scene.shown[picture]\n        given", TOOLS),
    ("ocr tool: half a box is no box", P, "if len(given) not in (0, 4):", "if len(given) > 4:", TOOLS),
    ("ocr tool: tells all that it read", P, "if len(found) > characters:", "if len(found) > 10 * characters:", TOOLS),
    ("ocr tool: its engine is missed late", S, "            try:\n                tool.check()",
     "            try:\n                tool.check  # noqa: B018", TOOLS),
]
# fmt: on
