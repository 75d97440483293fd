"""Runs untrusted programs, one in a process: `mmrl.rewards.programs.runner` forks these functions.

A request is a dict with the program's "source" and "scratch", the folder that it may write to. The answer holds what it
computed or drew, or {"failed": the reason}. Nothing here knows a gold answer.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import resource
import site
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.children.confinement import confine
from mmrl.children.forked import ForkedService
from mmrl.errors import describe_error
from mmrl.runtime.installation import extra_command

Request = Mapping[str, Any]
MAX_OUTPUT = 1 << 16  # characters of one test's output
MAX_FILE = 1 << 26  # bytes
MAX_SIDE = 2048  # pixels of an image
MAX_VERTICES = 1 << 20  # of a solid; also the largest number of triangles
TEXTS, MARKS, COLOURS, VALUES = "texts", "marks", "colours", "values"  # kinds of elements in a chart
_MODULES = {"charts": ("matplotlib", "charts"), "vectors": ("resvg_py", "svg"), "solids": ("trimesh", "solids")}
_SHARED = ("/usr", "/lib", "/lib64", "/etc/fonts", "/etc/ld.so.cache", "/dev/null", "/dev/urandom")


def executor(kind: str, confined: bool) -> ForkedService:
    """Builds the service for one kind of program: "tested", "charts", "vectors" or "solids". confined: whether a
    program is kept from other files and the network. Raises ValueError if a package that it needs is missing."""
    module, extra = _MODULES.get(kind, (None, None))
    if module is not None and extra is not None and importlib.util.find_spec(module) is None:
        raise ValueError(f"needs the package {module}: {extra_command(extra)}")
    execute = {"tested": run_tests, "charts": draw_chart, "vectors": draw_svg, "solids": build_solid}[kind]
    _PREPARE.get(kind, lambda: None)()  # imports what takes long, before processes are forked

    def serve(request: Request) -> dict[str, Any]:
        """Runs one program in this restricted process; returns its answer, or {"failed": the reason}."""
        try:
            _restrict(Path(request["scratch"]), confined)
            return execute(request)
        except BaseException as error:  # also SystemExit: any fault of a program becomes an answer
            return {"failed": describe_error(error)}

    return serve


def _restrict(scratch: Path, confined: bool) -> None:
    """Restricts this process, which serves one request, to the folders of libraries and the folder `scratch`."""
    os.chdir(scratch)
    os.environ.update(HOME=str(scratch), TMPDIR=str(scratch), MPLBACKEND="Agg")
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE, MAX_FILE))
    if confined:
        confine(map(Path, (*_SHARED, sys.base_prefix, sys.prefix, *site.getsitepackages())), scratch)


def _run(source: str, name: str = "__main__") -> dict[str, Any]:
    """Runs a program and returns its global names. sys.exit() with code 0 is a normal end. Raises what the program
    raises."""
    names: dict[str, Any] = {"__name__": name}
    try:
        exec(compile(source, "response.py", "exec"), names)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise ValueError(f"it ended with the exit code {end.code}") from None
    return names


def run_tests(request: Request) -> dict[str, Any]:
    """Runs the tests of a program, its "calls" or its "inputs" (see the two functions below), and returns their
    "outputs"."""
    return call_functions(request) if "calls" in request else run_scripts(request)


def call_functions(request: Request) -> dict[str, Any]:
    """Calls functions of the program, or evaluates expressions. "calls" holds (name, arguments), or the text of an
    expression. The "outputs" are JSON texts; None if a call failed."""
    with contextlib.redirect_stdout(io.StringIO()):
        names = _run(request["source"], "response")  # so that `if __name__ == "__main__"` does not run
        return {"outputs": [_call_output(names, call) for call in request["calls"]]}


def _call_output(names: dict[str, Any], call: str | tuple[str, list[Any]]) -> str | None:
    """Returns the JSON of the value of an expression, or of a call (function, arguments), given the program's names;
    None if it fails or is too long."""
    try:
        if isinstance(call, str):
            value = eval(compile(call, "test", "eval"), names)
        else:
            value = _function(names, call[0])(*call[1])
        text = json.dumps(value, default=_to_list)
    except Exception:  # whatever it is, the test fails
        return None
    return text if len(text) <= MAX_OUTPUT else None


def _to_list(value: object) -> list[Any]:
    """Converts a value that JSON cannot hold to a list: a set, which is sorted, or an array."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, np.ndarray | np.generic):
        listed: list[Any] = value.tolist()
        return listed
    raise TypeError(f"the program returned {type(value).__name__}, which JSON cannot hold")


def _function(names: dict[str, Any], name: str) -> Callable[..., Any]:
    """Returns a function of the program, or a method of its class Solution, as in LeetCode."""
    if name in names:
        function: Callable[..., Any] = names[name]
        return function
    solution = names["Solution"]()
    method: Callable[..., Any] = vars(type(solution))[name].__get__(solution)  # bound to the object
    return method


def run_scripts(request: Request) -> dict[str, Any]:
    """Runs the program once for each text of "inputs" as its standard input. The "outputs" are what it printed, None
    where it failed."""
    return {"outputs": [_run_with_input(request["source"], text) for text in request["inputs"]]}


def _run_with_input(source: str, text: str) -> str | None:
    """Runs a program with `text` as standard input and returns what it prints; None if it fails."""
    out = io.StringIO()
    sys.stdin = io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8")  # programs read sys.stdin.buffer, too
    try:
        with contextlib.redirect_stdout(out):
            _run(source)
    except Exception:
        return None
    return out.getvalue()[:MAX_OUTPUT]


def draw_chart(request: Request) -> dict[str, Any]:
    """Draws the last figure of a Matplotlib program. Returns its "image", uint8 [height, width, 3], and "elements",
    lists of texts by kind."""
    import matplotlib.pyplot as plt
    from matplotlib.figure import Figure

    Figure.savefig = lambda *_, **__: None  # type: ignore[method-assign]  # files that it saves are not compared
    plt.close = lambda *_, **__: None  # programs close figures that they have saved, but these are compared
    with contextlib.redirect_stdout(io.StringIO()):
        _run(request["source"])
    figures = plt.get_fignums()
    if not figures:
        return {"failed": "it drew no figure"}
    figure = plt.figure(figures[-1])
    width, height = (round(side) for side in figure.get_size_inches() * figure.dpi)
    if max(width, height) > MAX_SIDE:
        figure.set_dpi(figure.dpi * MAX_SIDE / max(width, height))
    figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())[..., :3]  # type: ignore[attr-defined]  # of Agg
    return {"image": np.ascontiguousarray(pixels), "elements": chart_elements(figure)}


def chart_elements(figure: Any) -> dict[str, list[str]]:
    """Returns the elements of a figure by kind: its non-empty texts, the types of marks, their colours, and their
    values, rounded to four digits."""
    from matplotlib.collections import Collection
    from matplotlib.colors import to_hex, to_rgba
    from matplotlib.container import BarContainer
    from matplotlib.lines import Line2D
    from matplotlib.patches import Wedge

    texts, marks, colours, values = list[str](), list[str](), list[str](), list[str]()
    for axes in figure.axes:
        legend = axes.get_legend()
        labels = [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts, *(legend.get_texts() if legend else [])]
        texts += [text.get_text() for text in labels if text.get_text().strip()]
        texts += [tick.get_text() for axis in (axes.xaxis, axes.yaxis) for tick in axis.get_ticklabels()]
        bars = [bar for container in axes.containers if isinstance(container, BarContainer) for bar in container]
        for bar in bars:
            marks.append("bar")
            colours.append(to_hex(bar.get_facecolor()))
            values.append(f"{bar.get_x():.4g} {bar.get_y():.4g} {bar.get_width():.4g} {bar.get_height():.4g}")
        for line in axes.lines:
            if isinstance(line, Line2D):
                marks.append("line")
                colours.append(to_hex(to_rgba(line.get_color())))
                values += [f"{x:.4g} {y:.4g}" for x, y in np.asarray(line.get_xydata(), float)]
        for wedge in (patch for patch in axes.patches if isinstance(patch, Wedge)):
            marks.append("wedge")
            colours.append(to_hex(wedge.get_facecolor()))
            values.append(f"{wedge.theta1:.4g} {wedge.theta2:.4g}")
        for points in axes.collections:
            if isinstance(points, Collection):
                marks.append("points")
                colours += [to_hex(colour) for colour in np.asarray(points.get_facecolor())[:1].tolist()]
                values += [f"{x:.4g} {y:.4g}" for x, y in np.asarray(points.get_offsets(), float)]
        marks += ["image"] * len(axes.images)
    return {TEXTS: [text for text in texts if text.strip()], MARKS: marks, COLOURS: colours, VALUES: values}


def draw_svg(request: Request) -> dict[str, Any]:
    """Draws an SVG on white at "size", (width, height). Returns its "image", uint8 [height, width, 3]. Links in it are
    not read."""
    import resvg_py
    from PIL import Image

    width, height = request["size"]
    png = bytes(resvg_py.svg_to_bytes(svg_string=request["source"], width=width, height=height, background="white"))
    image = Image.open(io.BytesIO(png)).convert("RGB")
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    return {"image": np.asarray(image)}


def build_solid(request: Request) -> dict[str, Any]:
    """Builds the solid that the program calls `result`, a mesh of trimesh or an object of CadQuery. Returns "vertices",
    fp64 [vertex, 3], and "triangles", int64 [triangle, 3]."""
    with contextlib.redirect_stdout(io.StringIO()):
        names = _run(request["source"])
    if "result" not in names:
        return {"failed": "it defines no `result`"}
    vertices, triangles = _mesh(names["result"])
    if max(len(vertices), len(triangles)) > MAX_VERTICES:
        return {"failed": f"its mesh has {len(triangles)} triangles, more than {MAX_VERTICES}"}
    return {"vertices": vertices, "triangles": triangles}


def _mesh(result: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the vertices [vertex, 3] and triangles [triangle, 3] of a solid; see `build_solid`."""
    import trimesh

    if isinstance(result, trimesh.Scene):
        result = result.to_mesh()
    if isinstance(result, trimesh.Trimesh):
        return np.asarray(result.vertices, np.float64), np.asarray(result.faces, np.int64)
    points, triangles = result.val().tessellate(1e-2)  # CadQuery; 1e-2: tolerance in its unit of length
    return np.array([point.toTuple() for point in points], np.float64), np.array(triangles, np.int64)


def _prepare_charts() -> None:
    """Imports matplotlib and reads its fonts before the first fork, so that not every process does."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure()
    figure.text(0, 0, "a")
    figure.canvas.draw()
    plt.close(figure)


def _prepare_solids() -> None:
    """Imports trimesh before the first fork."""
    import trimesh

    trimesh.creation.box()  # a first mesh, so that what trimesh imports at its first use is imported, too


_PREPARE: dict[str, Callable[[], None]] = {"charts": _prepare_charts, "solids": _prepare_solids}
