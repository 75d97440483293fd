"""Faults of `mmrl serve`. Entries are as in `planted_spans.py`."""

from __future__ import annotations

CHAT, ASKED = "mmrl/serving/chat.py", ("serving/test_chat.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("serve: any key will do", CHAT, "if self.server.key is not None and not", "if self.server.key is None and not", ASKED),
    ("serve: pages of browsers are answered", CHAT, 'if self.headers.get("Origin") is not None:', "if False:", ASKED),
    ("serve: requests have no end", CHAT, "if int(length) > MAX_BYTES:", "if False:", ASKED),
    ("serve: one seed for all choices", CHAT, "[request.seed + i for i in", "[request.seed for i in", ASKED),
    ("serve: the temperature of evaluation always", CHAT, "temperature=request.temperature,", "temperature=self.policy.evaluation_temperature,", ASKED),
    ("serve: the longest response always", CHAT, "max_response_length=request.limit,", "max_response_length=self.longest,", ASKED),
    ("serve: a response that was cut has stopped", CHAT, '"length" if sample.truncated else "stop"', '"stop" if sample.truncated else "length"', ASKED),
    ("serve: files are read", CHAT, 'not url.startswith("data:")', "False", ASKED),
    ("serve: developers are users", CHAT, '"system" if message["role"] == "developer"', '"user" if message["role"] == "developer"', ASKED),
    ("serve: booleans are numbers", CHAT, "if isinstance(value, bool) or not", "if not", ASKED),
    ("serve: an open door without a key", "mmrl/cli/serve.py", "if key is None and options.host not in", "if False and options.host not in", ASKED),
]
