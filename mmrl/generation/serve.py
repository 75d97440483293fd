"""`python -m mmrl.generation.serve ARGUMENTS`: vLLM's own server, which ends when the process that started it does."""

from __future__ import annotations

import os
import signal
import sys
import threading


def main() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


def _end_with_parent() -> None:
    """The parent holds the other end of our standard input and never writes; it closes however the parent ends."""
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)  # the engine's own processes too


if __name__ == "__main__":
    main()
