"""`python -m mmrl.generation.vllm.serve ARGUMENTS`: vLLM's own server, which ends together with the process that
started it."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from mmrl.children.processes import end_with_parent
from mmrl.runtime.logging import quieten_environment


def main() -> None:
    """Starts vLLM's API server, which ends with its parent, after a check that this host sees the model's folder."""
    quieten_environment()
    threading.Thread(target=end_with_parent, daemon=True).start()
    model = Path(sys.argv[sys.argv.index("--model") + 1])
    if not model.is_dir():
        sys.exit(
            f"Error: the folder {model} does not exist on this host; set rollout.generator.exchange to a folder that "
            "all hosts share"
        )
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


if __name__ == "__main__":
    main()
