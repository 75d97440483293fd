"""Off-screen rendering: the choice of an OpenGL backend, and a renderer that one thread owns."""

from __future__ import annotations

import atexit
import importlib.util
import os
import subprocess
import sys
import weakref
from functools import cache

import mujoco
import numpy as np
from numpy.typing import NDArray

from mmrl.errors import UserError

BACKENDS = ("egl", "osmesa")
PROBE = "import sys, mujoco.{0} as gl; c = gl.GLContext(8, 8); c.make_current(); c.free()"
COMMAND = "bash scripts/system_packages.sh"
MAX_GEOMS = 200  # geometries that a renderer has room for by default


@cache
def choose_backend() -> str:
    """Returns the first of `BACKENDS` that can make an OpenGL context, and sets MUJOCO_GL to it. If MUJOCO_GL is set,
    only that backend is tried.

    A backend that failed cannot be replaced within a process, so each is tried in a process of its own. Raises
    UserError, with the packages to install, if none works.
    """
    wanted = os.environ.get("MUJOCO_GL", "").lower()
    if wanted and wanted not in BACKENDS:
        raise UserError(f"MUJOCO_GL={wanted} cannot render off screen here; set it to egl or osmesa, or unset it")
    if importlib.util.find_spec("triton") is not None:
        # Triton and Mesa each carry an LLVM; loaded after Mesa's, Triton's ends the process with a segmentation fault.
        importlib.import_module("triton")
    os.environ.setdefault("LP_NUM_THREADS", "0")  # software rendering in the caller's thread: rows share the cores
    reasons = []
    for backend in [wanted] if wanted else BACKENDS:
        environment = {**os.environ, "MUJOCO_GL": backend, "PYOPENGL_PLATFORM": backend}
        tried = subprocess.run(
            [sys.executable, "-c", PROBE.format(backend)], env=environment, capture_output=True, text=True
        )
        if tried.returncode == 0:
            os.environ["MUJOCO_GL"] = os.environ["PYOPENGL_PLATFORM"] = backend
            return backend
        reasons.append(f"{backend}: {(tried.stderr.strip().splitlines() or [f'exit {tried.returncode}'])[-1]}")
    raise UserError(
        f"MuJoCo cannot render off screen ({'; '.join(reasons)}); on Debian and Ubuntu: apt-get install libegl1 "
        "libegl-mesa0 libgl1-mesa-dri, or libosmesa6 (scripts/system_packages.sh does it)"
    )


@cache
def _close_at_exit() -> weakref.WeakSet[Renderer]:
    """Returns the set of open renderers, which are closed when the process exits.

    The first call must come after OpenGL was loaded: atexit runs in reverse order, so renderers are closed before
    OpenGL."""
    renderers: weakref.WeakSet[Renderer] = weakref.WeakSet()

    def close() -> None:
        """Closes all renderers that still exist."""
        for renderer in list(renderers):
            renderer.close()

    atexit.register(close)
    return renderers


class Renderer:
    """A renderer for all models with the same meshes and textures as `model`. Only the thread that made it may use and
    close it."""

    def __init__(self, model: mujoco.MjModel, backend: str, size: int, max_geoms: int = MAX_GEOMS):
        """Makes an OpenGL context and the buffers for images of size x size pixels. backend: see `choose_backend`.
        max_geoms: the most shapes that a scene may have."""
        self._gl = importlib.import_module(f"mujoco.{backend}").GLContext(size, size)
        self._gl.make_current()
        _close_at_exit().add(self)
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._scene, self.option = mujoco.MjvScene(model, max_geoms), mujoco.MjvOption()
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._view, self._pixels = mujoco.MjrRect(0, 0, size, size), np.empty((size, size, 3), np.uint8)

    def render(self, model: mujoco.MjModel, data: mujoco.MjData, out: NDArray[np.uint8], camera: int = 0) -> None:
        """Writes the image of the camera with that id into `out` [size, size, 3]; mj_forward must have been called."""
        self._camera.fixedcamid, everything = camera, mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(model, data, self.option, None, self._camera, everything, self._scene)
        mujoco.mjr_render(self._view, self._scene, self._context)
        mujoco.mjr_readPixels(self._pixels, None, self._view, self._context)
        out[:] = self._pixels[::-1]  # OpenGL begins with the lowest row

    def close(self) -> None:
        _close_at_exit().discard(self)
        self._context.free()
        self._gl.free()
