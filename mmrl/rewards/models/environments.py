"""`mmrl rewards`: lists what rewards need, and installs environments of their own for those that cannot share the
trainer's packages.

An environment is complete once it has the file MARKER, which is written last and holds the list of packages.
"""

from __future__ import annotations

import errno
import fcntl
import shlex
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mmrl.errors import UserError
from mmrl.rewards.models.catalogue import CATALOGUE, CatalogueEntry, WeightFile
from mmrl.runtime.files import user_cache
from mmrl.runtime.installation import extra_command
from mmrl.settings.section import nearest

FOLDER_VARIABLE = "MMRL_REWARDS"  # environment variable with the default folder of environments
MARKER = "mmrl-rewards.txt"
PACKAGE = Path(__file__).resolve().parents[2]  # the folder of mmrl


def describe_catalogue() -> list[str]:
    """Returns the lines of `mmrl rewards`: each reward with its packages, where it runs, and its weights."""
    lines = []
    for name, entry in CATALOGUE.items():
        if entry.requirements:
            needs = f"an environment of its own: {', '.join(entry.requirements)}"
        else:
            extras = ", ".join(f"the extra {extra}" for extra in entry.extras)
            needs = f"the trainer's environment{extras and ', with '}{extras}"
        label = name if name == entry.reward else f"{name} ({entry.reward})"
        lines += [f"{label:<30} {needs}", *(f"{'':<30} {_describe_weights(file)}" for file in entry.weights)]
    return [*lines, "", "mmrl rewards install NAME makes an environment, and prints the lines of a recipe"]


def install(name: str, folder: Path | None) -> list[str]:
    """Installs the environment of a reward in a subfolder of `folder`, unless it exists. Returns the lines to print.

    folder: None for the user's cache folder. Raises UserError for an unknown name, a folder that cannot be written or
    that holds other files, a Python version for which the packages do not exist, another process that is installing the
    same environment, and if a package cannot be installed.
    """
    entry = _entry(name)
    if not entry.requirements:
        return [_needs_no_environment(name, entry), *_usage(entry, None)]
    environment = _environment(entry, folder)
    _check_python(name, entry)
    with _locked(environment):
        if _is_complete(environment, entry):
            _link_package(environment)
            return [f"{name} is already installed: {environment}", *_usage(entry, environment)]
        _create(environment)
        _install_packages(environment, entry.requirements)
        _link_package(environment)
        (environment / MARKER).write_text(_marker_text(entry))
    return [f"installed {name} in {environment}", *_usage(entry, environment)]


def plan(name: str, folder: Path | None) -> list[str]:
    """Returns the lines of `mmrl rewards install --dry-run`: the commands that would run, and what `install` prints.
    Raises UserError for an unknown name, and for a Python version for which the packages do not exist."""
    entry = _entry(name)
    if not entry.requirements:
        return [_needs_no_environment(name, entry), *_usage(entry, None)]
    environment = _environment(entry, folder)
    _check_python(name, entry)
    if _is_complete(environment, entry):
        return [f"{name} is already installed: {environment}", *_usage(entry, environment)]
    pip = shlex.join(_pip(environment, entry.requirements))
    return [f"{shlex.quote(sys.executable)} -m venv {shlex.quote(str(environment))}", pip, *_usage(entry, environment)]


def interpreter(environment: Path) -> Path:
    """Returns the path of an environment's Python interpreter."""
    return environment / "bin" / "python"


def _entry(name: str) -> CatalogueEntry:
    if name not in CATALOGUE:
        raise UserError(f"there is no reward {name} to install{nearest(name, CATALOGUE)}; `mmrl rewards` lists all")
    return CATALOGUE[name]


def _environment(entry: CatalogueEntry, folder: Path | None) -> Path:
    return (user_cache("rewards", FOLDER_VARIABLE) if folder is None else folder).absolute() / entry.environment


def _check_python(name: str, entry: CatalogueEntry) -> None:
    """Raises UserError if this Python version is too new for the packages."""
    if entry.python_below is not None and sys.version_info[:2] >= entry.python_below:
        newest = f"{entry.python_below[0]}.{entry.python_below[1]}"
        raise UserError(
            f"the packages of {name} need a Python below {newest}, not {sys.version_info[0]}.{sys.version_info[1]}; "
            "run this command with an mmrl that is installed under an older Python"
        )


def _needs_no_environment(name: str, entry: CatalogueEntry) -> str:
    extra = f": {extra_command(*entry.extras)}" if entry.extras else ""
    return f"{name} runs in the trainer's environment{extra or ', which has all packages that it needs'}"


def _usage(entry: CatalogueEntry, environment: Path | None) -> list[str]:
    """Returns lines about the weights, the server to start, and the recipe. environment: the folder of the reward's own
    environment; None if it runs in the trainer's."""
    lines = [f"weights, not installed: {_describe_weights(file)}" for file in entry.weights]
    python = None if environment is None else shlex.quote(str(interpreter(environment)))
    if entry.serve:
        lines.append(f"start this server before training: {python} {entry.serve}")
    lines += ["lines of a recipe:", "task:", "  rewards:", f"    - name: {entry.reward}"]
    if python is not None and not entry.serve:
        lines.append(f"      python: {python}")
    return lines + (["      options:", *(f"        {option}" for option in entry.options)] if entry.options else [])


def _describe_weights(file: WeightFile) -> str:
    size = "size not known" if file.gigabytes is None else f"{file.gigabytes:g} GB"
    return f"{file.name} ({size}; license: {file.license or 'see its page'})"


def _marker_text(entry: CatalogueEntry) -> str:
    return "".join(f"{requirement}\n" for requirement in entry.requirements)


def _is_complete(environment: Path, entry: CatalogueEntry) -> bool:
    """Returns whether the environment was installed to the end, with the current list of packages."""
    marker = environment / MARKER
    return marker.is_file() and marker.read_text() == _marker_text(entry) and interpreter(environment).exists()


@contextmanager
def _locked(environment: Path) -> Iterator[None]:
    """Holds a lock on the environment, beside it. Raises UserError if the folder cannot be written, or another process
    holds the lock."""
    try:
        environment.parent.mkdir(parents=True, exist_ok=True)
        lock = (environment.parent / f".{environment.name}.lock").open("w")
    except OSError as error:
        raise UserError(f"{environment.parent} cannot be written: {error.strerror}; choose another --folder") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise UserError(f"another process is installing {environment}; wait until it has ended") from None
        yield


def _create(environment: Path) -> None:
    """Makes an empty environment in place of an incomplete one. Raises UserError if the folder holds other files or
    cannot be written."""
    if environment.exists() and not (environment / "pyvenv.cfg").exists() and any(environment.iterdir()):
        raise UserError(f"{environment} exists but is not a Python environment; choose another --folder, or remove it")
    try:
        venv.EnvBuilder(clear=True, symlinks=True, with_pip=True).create(environment)
    except OSError as error:
        raise UserError(f"{environment} cannot be written: {error.strerror}; choose another --folder") from None
    except subprocess.CalledProcessError as error:
        raise UserError(
            f"python -m venv {environment} failed: {error}; if Python's module ensurepip is missing, install it (on "
            "Debian and Ubuntu: apt-get install python3-venv)"
        ) from None


def _pip(environment: Path, requirements: Sequence[str]) -> list[str]:
    """Returns the command that installs packages. -I makes Python ignore PYTHONPATH and the packages in the user's
    home."""
    quiet = ("--disable-pip-version-check", "--no-input")
    return [str(interpreter(environment)), "-I", "-m", "pip", "install", *quiet, *requirements]


def _install_packages(environment: Path, requirements: Sequence[str]) -> None:
    """Installs packages; pip's progress goes to stderr. Raises UserError with the last line of pip's errors."""
    pip = subprocess.Popen(_pip(environment, requirements), stdout=2, stderr=subprocess.PIPE, text=True)
    try:
        _, errors = pip.communicate()
    except BaseException:  # Ctrl-C: an environment without MARKER is installed again
        pip.kill()
        pip.wait()
        raise
    if pip.returncode:
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        last = next((line for line in reversed(lines) if line.startswith("ERROR")), (lines or ["no message"])[-1])
        raise UserError(f"pip could not install {' '.join(requirements):.200}: {last}; run the same command again")


def _link_package(environment: Path) -> None:
    """Makes this mmrl importable in the environment, without the other packages of the trainer."""
    command = [str(interpreter(environment)), "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    link, target = packages / "mmrl", PACKAGE
    if not (link.is_symlink() and link.resolve() == target.resolve()):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
