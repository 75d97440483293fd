"""Weights of a second model, such as a teacher: a folder, a model on a hub, or the final weights of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

from pydantic import model_validator

from mmrl.errors import UserError
from mmrl.settings import recipes
from mmrl.settings.section import Section, option


class RecipeNotRun(UserError):
    """Raised if weights are the final ones of a recipe that has not been run."""


class WeightsOrigin(Section):
    """The weights of a second model: the key `path` or the key `recipe`. A job runs the recipe first, as it does for a
    warm start."""

    required: ClassVar[bool] = True  # one of path and recipe has to be set
    path: str | None = option(None, "a folder or a hub name")
    recipe: str | None = option(
        None, "in place of a path, a recipe's name: it is run first, and its final weights are taken"
    )

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.path is not None and self.recipe is not None:
            raise ValueError("set path or recipe, not both")
        if self.required and self.path is None and self.recipe is None:
            raise ValueError("set path (a folder or a hub name) or recipe (its final weights are taken)")
        return self

    @property
    def folder(self) -> str | None:
        """Returns the folder or the hub name of the weights, which need not exist yet."""
        if self.recipe is None:
            return self.path
        return str(Path(recipes.run_dir(recipes.resolve(Path(self.recipe)))) / "final")

    def existing(self) -> str | None:
        """Returns `folder`. Raises RecipeNotRun if the recipe has not written it yet."""
        if self.recipe is not None and not Path(str(self.folder)).is_dir():
            raise RecipeNotRun(f"recipe={self.recipe} has not been run; run it first: mmrl train {self.recipe}")
        return self.folder
