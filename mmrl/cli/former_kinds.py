"""Replaces old names of types and keys in the text of a configuration by the current ones. Comments, order and layout
of everything else stay.

A type is the value of `type` in a choice, such as `{type: clip, low: 0.2}`. An old type may be replaced by one choice
with other keys, or by several choices in a list.
"""

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


def with_current_names(text: str) -> str:
    """Returns the text of a configuration with old names of types and keys replaced by the current ones.

    Raises yaml.YAMLError if it is not YAML, and UserError if an old type was replaced by several choices and its key
    takes only one.
    """
    root = yaml.compose(text)
    if root is None:
        return text
    # a set: the node of an anchor is visited once for each alias
    edits = set(Rewriter(text).edits(root, OmegaConf.to_container(OmegaConf.create(text)), None))
    for start, end, replacement in sorted(edits, reverse=True):
        text = text[:start] + replacement + text[end:]
    return text


class Rewriter:
    """Finds the edits that bring one YAML text up to date."""

    def __init__(self, text: str) -> None:
        self._text = text

    def edits(self, node: Node, value: Any, key: str | None) -> Iterator[Edit]:
        """Yields the edits of a YAML node and of all nodes below it.

        value: the node's value as OmegaConf reads it. key: the key whose value is the node, or a list with it.
        """
        if isinstance(node, SequenceNode):
            for item, child in zip(node.value, value, strict=True):
                yield from self.edits(item, child, key)
                # the first choice replaces the item, further ones follow it
                yield from self._insert_items(node, item, _current_trees(child, key)[1:])
        elif not (current := _current_trees(value, key)):
            # not a choice of an old type: looks at the nodes below it
            values = {str(name): child for name, child in value.items()} if isinstance(value, dict) else {}
            for name, child in node.value if values else ():
                if name.value in values:  # the merge key << is not in it
                    yield from _rename_key(name)
                    child_key = key if name.value.isdigit() else name.value  # a number is the index of a list item
                    yield from self.edits(child, _require_single(values[name.value], child_key), child_key)
        elif isinstance(node, MappingNode):
            yield from self._rewrite_mapping(node, value, current[0])
        else:  # a choice without options, of which only the name of the type is written
            yield node.start_mark.index, node.end_mark.index, as_yaml(current[0])

    def _insert_items(self, items: SequenceNode, old: Node, added: list[Tree]) -> Iterator[Edit]:
        """Yields an edit that inserts the choices `added` into a list, after its item `old`."""
        separator = ", " if items.flow_style else f"\n{' ' * items.start_mark.column}- "
        yield _end(old), _end(old), "".join(separator + as_yaml(tree) for tree in added)

    def _rewrite_mapping(self, node: MappingNode, old: Tree, current: Tree) -> Iterator[Edit]:
        """Yields the edits that turn the choice `old` into `current`. Unchanged keys keep their text, and their values
        are edited in turn."""
        for name, child in node.value:
            if name.value in current and old[name.value] == current[name.value]:
                yield from _rename_key(name)
                yield from self.edits(child, old[name.value], name.value)
            elif name.value in current:
                yield child.start_mark.index, _end(child), as_yaml(current[name.value])
        yield from self._remove_keys(node, current)
        yield self._insert_keys(node, {key: value for key, value in current.items() if key not in old})

    def _remove_keys(self, node: MappingNode, current: Tree) -> Iterator[Edit]:
        """Yields an edit for each run of adjacent keys that are not in `current`, to remove them."""
        for keeps, run in groupby(enumerate(node.value), lambda pair: pair[1][0].value in (*current, "<<")):
            if keeps:
                continue
            positions = [i for i, _ in run]
            (first, _), (_, last) = node.value[positions[0]], node.value[positions[-1]]
            if positions[-1] + 1 < len(node.value):
                yield first.start_mark.index, node.value[positions[-1] + 1][0].start_mark.index, ""
            elif node.flow_style:
                yield _end(node.value[positions[0] - 1][1]), _end(last), ""
            else:
                yield self._text.rfind("\n", 0, first.start_mark.index), _end(last), ""

    def _insert_keys(self, node: MappingNode, added: Tree) -> Edit:
        """Returns the edit that inserts keys after the key `type` of a choice."""
        kind = next(child for name, child in node.value if name.value == "type")
        if node.flow_style:
            return _end(kind), _end(kind), "".join(f", {key}: {as_yaml(value)}" for key, value in added.items())
        line = self._text.find("\n", _end(kind))
        position = len(self._text) if line < 0 else line
        separator = "\n" + " " * node.value[0][0].start_mark.column
        return position, position, "".join(f"{separator}{key}: {as_yaml(value)}" for key, value in added.items())


def _current_trees(value: object, key: str | None) -> list[Tree]:
    """Returns the choices that replace a choice with an old type; [] if its type is not an old one."""
    return [] if isinstance(value, list) or key not in CHOICES_BY_KEY else current_forms(CHOICES_BY_KEY[key], value)


def _require_single(value: T, key: str | None) -> T:
    """Returns `value`. Raises UserError if its old type was replaced by several types, since `key` takes only one."""
    if len(current := _current_trees(value, key)) > 1:
        choices = " and ".join(map(as_yaml, current))
        raise UserError(
            f"{key}: {as_yaml(value)} was replaced by {choices}, but {key} takes only one; write one of them"
        )
    return value


def _end(node: Node) -> int:
    """Returns the offset in characters where a node ends. PyYAML's own end mark of a block comes after the blank lines
    and comments that follow it."""
    if isinstance(node, SequenceNode) and not node.flow_style and node.value:
        return _end(node.value[-1])
    if isinstance(node, MappingNode) and not node.flow_style and node.value:
        return _end(node.value[-1][1])
    return node.end_mark.index


def _rename_key(name: Node) -> Iterator[Edit]:
    """Yields the edit of a key whose name has changed; nothing for any other key."""
    if (current := present_key(name.value)) != name.value:
        yield name.start_mark.index, name.end_mark.index, current
