"""Rewrites former kinds and keys in a YAML text; everything around them keeps its form."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from yaml.nodes import MappingNode, Node, SequenceNode

from mmrl.algorithms.algorithm import Algorithm
from mmrl.algorithms.reward_transforms.transform import Transform
from mmrl.algorithms.surrogates.surrogate import Surrogate
from mmrl.errors import UserError
from mmrl.moved import present_key
from mmrl.policies.settings import ModelSettings
from mmrl.settings import Choice, as_yaml, current_forms
from mmrl.tasks.visual_qa.settings import Questions
from mmrl.terms.term import Shaper, Term

CHOICES_BY_KEY: dict[str, type[Choice]] = {
    "model": ModelSettings,
    "data": Questions,
    "algorithm": Algorithm,
    "surrogate": Surrogate,
    "terms": Term,
    "term": Term,
    "shaping": Shaper,
    "transforms": Transform,
}
Edit = tuple[int, int, str]  # start and end in characters, and the replacement
Tree = dict[str, Any]
T = TypeVar("T")


def with_present_kinds(text: str) -> str:
    """Returns the text of a configuration with former kinds and keys replaced by present ones. Raises yaml.YAMLError,
    and UserError for a kind that cannot be rewritten where it stands."""
    root = yaml.compose(text)
    if root is None:
        return text
    edits = set(Rewriting(text).edits(root, OmegaConf.to_container(OmegaConf.create(text)), None))  # once an anchor
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text


class Rewriting:
    """Collects the edits of one YAML text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def edits(self, node: Node, value: Any, key: str | None) -> Iterator[Edit]:
        """Yields the edits of `node`. value: its value as configurations are read. key: the key that the node, or the
        list around it, is the value of."""
        if isinstance(node, SequenceNode):
            for item, inner in zip(node.value, value, strict=True):
                yield from self.edits(item, inner, key)
                yield from self._further(node, item, _now(inner, key)[1:])
        elif not (now := _now(value, key)):
            values = {str(name): inner for name, inner in value.items()} if isinstance(value, dict) else {}
            for name, inner in node.value if values else ():
                if name.value in values:  # not so <<
                    yield from _renamed(name)
                    below = key if name.value.isdigit() else name.value  # a number picks an item of a list
                    yield from self.edits(inner, _alone(values[name.value], below), below)
        elif isinstance(node, MappingNode):
            yield from self._changed(node, value, now[0])
        else:
            yield node.start_mark.index, node.end_mark.index, as_yaml(now[0])

    def _further(self, items: SequenceNode, before: Node, new: list[Tree]) -> Iterator[Edit]:
        """Yields further items behind one of a list."""
        between = ", " if items.flow_style else f"\n{' ' * items.start_mark.column}- "
        yield _end(before), _end(before), "".join(between + as_yaml(tree) for tree in new)

    def _changed(self, node: MappingNode, before: Tree, now: Tree) -> Iterator[Edit]:
        """Yields the edits of a mapping. Unchanged keys keep their text; their values may hold former kinds in turn."""
        for name, inner in node.value:
            if name.value in now and before[name.value] == now[name.value]:
                yield from _renamed(name)
                yield from self.edits(inner, before[name.value], name.value)
            elif name.value in now:
                yield inner.start_mark.index, _end(inner), as_yaml(now[name.value])
        yield from self._without(node, now)
        yield self._added(node, {key: value for key, value in now.items() if key not in before})

    def _without(self, node: MappingNode, now: Tree) -> Iterator[Edit]:
        """Yields an edit that removes each run of keys that no longer exist."""
        for stays, run in groupby(enumerate(node.value), lambda pair: pair[1][0].value in (*now, "<<")):
            if stays:
                continue
            numbers = [i for i, _ in run]
            (first, _), (_, last) = node.value[numbers[0]], node.value[numbers[-1]]
            if numbers[-1] + 1 < len(node.value):
                yield first.start_mark.index, node.value[numbers[-1] + 1][0].start_mark.index, ""
            elif node.flow_style:
                yield _end(node.value[numbers[0] - 1][1]), _end(last), ""
            else:
                yield self._text.rfind("\n", 0, first.start_mark.index), _end(last), ""

    def _added(self, node: MappingNode, new: Tree) -> Edit:
        """Returns the edit that adds keys behind the type."""
        kind = next(inner for name, inner in node.value if name.value == "type")
        if node.flow_style:
            return _end(kind), _end(kind), "".join(f", {key}: {as_yaml(value)}" for key, value in new.items())
        line = self._text.find("\n", _end(kind))
        position = len(self._text) if line < 0 else line
        between = "\n" + " " * node.value[0][0].start_mark.column
        return position, position, "".join(f"{between}{key}: {as_yaml(value)}" for key, value in new.items())


def _now(value: object, key: str | None) -> list[Tree]:
    return [] if isinstance(value, list) or key not in CHOICES_BY_KEY else current_forms(CHOICES_BY_KEY[key], value)


def _alone(value: T, key: str | None) -> T:
    """Returns `value`. Raises UserError where it is several choices today and the key holds one."""
    if len(now := _now(value, key)) > 1:
        raise UserError(f"{as_yaml(value)} is {' and '.join(map(as_yaml, now))} now, and {key} has room for one")
    return value


def _end(node: Node) -> int:
    """Returns the offset where a node ends. PyYAML's end mark of a block lies behind the blank lines and comments after
    it."""
    if isinstance(node, SequenceNode) and not node.flow_style and node.value:
        return _end(node.value[-1])
    if isinstance(node, MappingNode) and not node.flow_style and node.value:
        return _end(node.value[-1][1])
    return node.end_mark.index


def _renamed(name: Node) -> Iterator[Edit]:
    """Yields the present name of a key that has another one."""
    if (now := present_key(name.value)) != name.value:
        yield name.start_mark.index, name.end_mark.index, now
