"""A reward of programs that have to build a solid."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import UserError
from mmrl.rewards.programs.charts import normalize_weights
from mmrl.rewards.programs.responses import extract_program
from mmrl.rewards.programs.runner import ProgramReward
from mmrl.rewards.types import Score
from mmrl.rollouts import Prompt, Sample

if TYPE_CHECKING:
    from trimesh import Trimesh

MAX_CACHED = 256  # gold solids that are kept


class SolidCode(ProgramReward):
    """Similarity of the solid that a program builds to the gold solid: 0 if it fails, else the mean, weighted by
    `weights`, of

    runs      1
    geometry  the F1 of `points` points sampled on either surface; a point is right if the other surface is nearer than
              `threshold` of the gold's diagonal
    topology  the share of three that agree: whether the surface is closed, the number of bodies, the Euler number

    The program calls its solid `result`: a mesh of trimesh (the extra `solids`), or an object of CadQuery if that is
    installed. The row's answer is a mesh file (STL, OBJ, PLY) or a gold program. HiCAD's reward of validity, geometry
    and topology, reconstructed. The other options are those of `ProgramRunner`.
    """

    kind = "solids"

    def __init__(
        self,
        *,
        weights: Mapping[str, float] | None = None,
        points: int = 2048,
        threshold: float = 0.02,
        **options: Any,
    ) -> None:
        known = ("runs", "geometry", "topology")
        self.weights = normalize_weights(weights or {"runs": 0.1, "geometry": 0.6, "topology": 0.3}, known)
        if points < 1 or not threshold > 0:
            raise ValueError(f"points and threshold must be positive, not {points} and {threshold}")
        self.points, self.threshold = points, threshold
        super().__init__(**options)
        self._golds: OrderedDict[str, Trimesh] = OrderedDict()  # gold meshes by answer

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Scores programs. Raises UserError for a row whose answer is not a solid."""
        golds = [self._gold(sample.prompt) for sample in samples]
        rows = [row for row, sample in enumerate(samples) if extract_program(sample)]
        answers = self.runner.run([{"source": extract_program(samples[row])} for row in rows])
        scores: list[Score] = [0.0] * len(samples)
        for row, answer in zip(rows, answers, strict=True):
            mesh = to_mesh(answer)
            scores[row] = 0.0 if mesh is None else self._score(mesh, golds[row])
        return scores

    def _score(self, mesh: Trimesh, gold: Trimesh) -> float:
        """Returns the score of a program's mesh, 0 to 1: the mean of the parts, weighted by `weights`."""
        parts = {
            "runs": lambda: 1.0,
            "geometry": lambda: surface_f1(mesh, gold, self.points, self.threshold),
            "topology": lambda: same_topology(mesh, gold),
        }
        return sum(weight * parts[name]() for name, weight in self.weights.items())

    def _gold(self, prompt: Prompt) -> Trimesh:
        """Returns the gold mesh of a prompt, from the cache if it is there. Raises UserError like `_build_gold`."""
        answer = str(prompt.answer)
        if answer not in self._golds:
            self._golds[answer] = self._build_gold(prompt, answer)
            while len(self._golds) > MAX_CACHED:
                self._golds.popitem(last=False)
        return self._golds[answer]

    def _build_gold(self, prompt: Prompt, answer: str) -> Trimesh:
        """Returns the mesh of a gold answer, a file or a program that builds it. Raises UserError if there is none."""
        if "\n" not in answer and Path(answer).suffix.lower() in (".stl", ".obj", ".ply"):
            import trimesh

            try:
                return trimesh.load_mesh(answer)
            except (OSError, ValueError) as error:
                raise UserError(
                    f"prompt {prompt.id!r}: the file in its answer, {answer}, cannot be read: {error}"
                ) from None
        (result,) = self.runner.run([{"source": answer}])
        mesh = to_mesh(result)
        if mesh is None:
            reason = result.get("failed") or "its mesh is empty or not valid"
            raise UserError(f"prompt {prompt.id!r}: the program in its answer builds no solid: {reason}")
        return mesh


def to_mesh(answer: Mapping[str, Any]) -> Trimesh | None:
    """Converts an executor's answer to a mesh; None for a failure, and for anything that is no mesh, since a program
    may have written the answer."""
    import trimesh

    vertices, triangles = answer.get("vertices"), answer.get("triangles")
    if not isinstance(vertices, np.ndarray) or not isinstance(triangles, np.ndarray) or not len(triangles):
        return None
    if vertices.dtype != np.float64 or triangles.dtype != np.int64 or {vertices.ndim, triangles.ndim} != {2}:
        return None
    if vertices.shape[1] != 3 or triangles.shape[1] != 3 or not np.isfinite(vertices).all():
        return None
    if triangles.min() < 0 or triangles.max() >= len(vertices):
        return None
    mesh = trimesh.Trimesh(vertices, triangles)
    return mesh if mesh.area > 0 else None


def surface_f1(mesh: Trimesh, gold: Trimesh, points: int, threshold: float) -> float:
    """Returns the F1 of two surfaces: the harmonic mean of the shares of points on each whose nearest point on the
    other is within `threshold` of the gold's diagonal.

    points: the number of points to sample on each surface, with a fixed seed.
    """
    import trimesh
    from scipy.spatial import cKDTree

    mesh_points, gold_points = (trimesh.sample.sample_surface(m, points, seed=0)[0] for m in (mesh, gold))
    # Two samples of one surface differ, too, so distances are taken to denser samples.
    dense_mesh, dense_gold = (trimesh.sample.sample_surface(m, 8 * points, seed=1)[0] for m in (mesh, gold))
    max_distance = threshold * float(np.linalg.norm(gold.extents))
    precision = float((cKDTree(dense_gold).query(mesh_points)[0] <= max_distance).mean())
    recall = float((cKDTree(dense_mesh).query(gold_points)[0] <= max_distance).mean())
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def same_topology(mesh: Trimesh, gold: Trimesh) -> float:
    """Returns the share of three properties that agree: whether the surface is closed, the number of bodies, the Euler
    number."""
    properties, gold_properties = ((m.is_watertight, m.body_count, m.euler_number) for m in (mesh, gold))
    return float(np.mean([a == b for a, b in zip(properties, gold_properties, strict=True)]))
