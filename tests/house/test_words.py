"""The field's words: names and first words of docstrings that nobody else uses do not come back."""

import ast
import re

import pytest

from tests.house.layout import ROOT, modules

# Names that say that something was found, told or placed, and not what it is.
DIALECT = {
    *("found", "told", "said", "made", "asked", "seen", "kept", "given", "place", "places"),
    *("heat", "lent", "awake", "going", "likely"),
}
ODD = ("Of", "What", "Whether", "As", "Where", "How", "By", "Which", "From")
# Keys of saved weights, and an option of users.
STAYING = {
    ("mmrl.policies.vla.backbones.small", "places"),
    ("mmrl.policies.vla.heads.layers", "places"),
    ("mmrl.sims.libero.simulator", "kept"),
}
MODULES = modules()
PAGES = [
    path
    for path in (
        *ROOT.glob("*.md"),
        *(p for f in ("mmrl", "tasks", "sims", "configs") for p in (ROOT / f).rglob("*.md")),
    )
]


def names(tree):
    """Yields the names that a module gives to classes, functions, arguments, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def odd(name):
    return name.lower() in DIALECT or bool(re.search(r"(?i)picture|(^|_)looks?(_|$)|^Look", name))


def docstrings(tree):
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return [text for node in ast.walk(tree) if isinstance(node, kinds) and (text := ast.get_docstring(node))]


@pytest.mark.parametrize(("module", "path"), MODULES.items(), ids=list(MODULES))
def test_names_are_the_fields(module, path):
    unusual = {name for name in names(ast.parse(path.read_text())) if odd(name)}
    assert {name for name in unusual if (module, name) not in STAYING} == set()


@pytest.mark.parametrize("path", MODULES.values(), ids=list(MODULES))
def test_docstrings_begin_with_a_verb_or_a_noun(path):
    first = {text.split()[0].strip(".,:;") for text in docstrings(ast.parse(path.read_text()))}
    assert first & set(ODD) == set()


@pytest.mark.parametrize("path", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])
def test_pages_speak_of_images(path):
    assert re.findall(r"(?i)\bpictures?\b", path.read_text()) == []


def test_the_rules_find_what_they_are_for():
    tree = ast.parse('def told(look):\n    """Whether it is."""\n    found = look\n    self.picture_rewards = found\n')
    assert [name for name in names(tree) if odd(name)] == ["told", "look", "found", "picture_rewards"]
    assert docstrings(tree)[0].split()[0] in ODD and not odd("foundation") and not odd("placement")
