"""Sandboxing of a process and its later children by Linux's Landlock, also for root. The process may read some folders
and write to one, and may neither use TCP nor send signals to processes outside.

Older kernels restrict less: TCP needs Linux 6.7, signals need 6.12. See `confinable`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # system calls, the same on every architecture
_VERSION = 1  # flag of _CREATE_RULESET, with which it returns the version of the interface
_PATH_BENEATH = 1  # kind of a rule: what is allowed below a path
_NO_NEW_PRIVILEGES = 38  # linux/prctl.h
# Rights of linux/landlock.h, by the first version of the interface that has them.
_FILES = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
_READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read files, list folders
_OF_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15  # the rights that apply to a file that is not a folder
_CONNECTIONS = {4: 0b11}  # bind and connect TCP
_SCOPES = {6: 0b11}  # abstract sockets and signals


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("connections", ctypes.c_uint64), ("scopes", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = [("allowed", ctypes.c_uint64), ("descriptor", ctypes.c_int32)]


def confinable() -> bool:
    """Returns whether this kernel can confine a process to folders."""
    return _version() >= 1


def confine(readable: Iterable[Path], writable: Path) -> None:
    """Restricts this thread and everything that it starts later, irreversibly: it may read files below `readable`, and
    read and write files below `writable`. Paths that do not exist are ignored; open files stay open. Raises OSError if
    the kernel refuses."""
    version = _version()
    every = _rights(_FILES, version)
    rules = _Ruleset(every, _rights(_CONNECTIONS, version), _rights(_SCOPES, version))
    # older kernels know only the first fields of the structure
    size = ctypes.sizeof(rules) if version >= 6 else 16 if version >= 4 else 8
    ruleset = _call(_CREATE_RULESET, ctypes.byref(rules), size, 0)
    try:
        for path in readable:
            _allow(ruleset, path, _READ & every)
        _allow(ruleset, writable, every)
        if ctypes.CDLL(None).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
            raise OSError("the kernel does not set no_new_privs (prctl), which confined rewards need")
        _call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: Path, rights: int) -> None:
    """Adds to a ruleset that a process has `rights`, access bits of Landlock, below a path. ruleset: its file
    descriptor."""
    if not path.exists():
        return
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = _PathBeneath(rights if path.is_dir() else rights & _OF_FILES, descriptor)
        _call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(descriptor)


def _rights(by_version: dict[int, int], version: int) -> int:
    """Returns all rights that a version of the interface has."""
    return sum(rights for first, rights in by_version.items() if first <= version)


def _version() -> int:
    """Returns the version of the kernel's interface; 0 if there is none."""
    if sys.platform != "linux":
        return 0
    return max(0, int(ctypes.CDLL(None).syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)))


def _call(number: int, *arguments: object) -> int:
    """Makes the system call `number` and returns its result. Raises OSError if it fails."""
    library = ctypes.CDLL(None, use_errno=True)
    answer = int(library.syscall(number, *arguments))
    if answer < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return answer
