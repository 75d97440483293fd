"""Sections of a configuration, and how to name what is wrong in one."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

Model = TypeVar("Model", bound=BaseModel)
UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")  # pydantic's names for a key that a section does not have


def parse(model: type[Model], options: Mapping[str, Any], name: str) -> Model:
    """`options` as a `model`. Raises ValueError in one line that names the key at fault, or the section `name` where it
    is none in particular, and the nearest valid key."""
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        first = error.errors()[0]
        path, known = follow(model, first["loc"])
        where = ".".join(path)
        if first["type"] in UNKNOWN:
            near = difflib.get_close_matches(path[-1], known, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown key {where}{hint} (known: {', '.join(known)})") from error
        raise ValueError(f"{where or name}: {first['msg'].removeprefix('Value error, ')}") from error


def follow(model: type, location: tuple[int | str, ...]) -> tuple[list[str], list[str]]:
    """The keys that lead to pydantic's `location`, as the user wrote them, and the keys of the section the last one is
    in. Pydantic puts the `kind` of a section that may be of several among them, which is a value."""
    sections, path = [model], []
    for place, part in enumerate(location):
        of_this_kind = [section for section in sections if len(sections) > 1 and _kind(section) == part]
        if of_this_kind:
            sections = of_this_kind
            continue
        path.append(str(part))
        if place + 1 < len(location) and isinstance(part, str):
            sections = sections_in(fields(sections[0]).get(part)) or sections
    return path, list(fields(sections[0]))


def fields(model: type) -> dict[str, Any]:
    """Field names and annotations of a section, be it a pydantic model or a dataclass."""
    if issubclass(model, BaseModel):
        return {name: field.annotation for name, field in model.model_fields.items()}
    hints = typing.get_type_hints(model)
    return {name: hint for name, hint in hints.items() if hint is not typing.ClassVar}


def sections_in(annotation: Any) -> list[type]:
    """All sections that a field with this annotation may hold."""
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or dataclasses.is_dataclass(annotation)):
        return [annotation]
    return [m for argument in typing.get_args(annotation) for m in sections_in(argument)]


def _kind(section: type) -> Any:
    kinds = typing.get_args(fields(section).get("kind"))
    return kinds[0] if len(kinds) == 1 else None
