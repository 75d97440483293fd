"""python -m mmrl.kernels build [FOLDER]: compile the kernels ahead of time.
python -m mmrl.kernels build --prebuilt: compile the libraries of a wheel into the package, for all processors and GPUs.
python -m mmrl.kernels status: print whether the kernels can be used."""

import sys
from pathlib import Path

from mmrl.kernels import KernelError, build, prebuilt, status


def main(arguments: list[str]) -> int:
    """Runs `build` or `status` of the kernels. Returns the exit code."""
    missing = ""
    if arguments[:1] == ["build"] and len(arguments) < 3:
        try:
            if arguments[1:] == ["--prebuilt"]:
                paths, missing = prebuilt.build()
            else:
                paths = build(into=Path(arguments[1]) if arguments[1:] else None)
        except KernelError as error:
            print(error, file=sys.stderr)
            return 2
        print("\n".join(map(str, paths)) or "no compiler found: plain PyTorch is used instead")
        if missing:
            print(missing)
    elif arguments == ["status"]:
        print("\n".join(status()))
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


sys.exit(main(sys.argv[1:]))
