"""python -m mmrl.kernels build [FOLDER]: compile ahead of time. python -m mmrl.kernels status: what there is."""

import sys
from pathlib import Path

from mmrl.kernels import KernelError, build, status


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["build"] and len(arguments) < 3:
        try:
            paths = build(into=Path(arguments[1]) if arguments[1:] else None)
        except KernelError as error:
            print(error, file=sys.stderr)
            return 2
        print("\n".join(map(str, paths)) or "no compiler found: the torch reference computes")
    elif arguments == ["status"]:
        print("\n".join(status()))
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


sys.exit(main(sys.argv[1:]))
