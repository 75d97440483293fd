"""The house: how much lies in a folder, whether each name means one thing, and whether a wheel would hold all of it."""

import ast
import tomllib
from collections import Counter

from tests.house.layout import ROOT, modules

AT_THE_ROOT, IN_A_FOLDER, RECIPES_IN_A_FOLDER = 9, 15, 20
IN_A_CLASS = 25  # methods, properties among them
MODULES = modules()


def test_no_folder_is_too_full():
    files = [path.relative_to(ROOT) for path in MODULES.values() if path.name != "__init__.py"]
    counts = Counter(str(file.parent) for file in files)
    assert counts.pop("mmrl") <= AT_THE_ROOT
    assert {folder: count for folder, count in counts.items() if count > IN_A_FOLDER} == {}
    recipes = Counter(str(path.parent.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.yaml"))
    assert {folder: count for folder, count in recipes.items() if count > RECIPES_IN_A_FOLDER} == {}


def test_no_two_classes_have_one_name():
    named: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                named.setdefault(node.name, []).append(module)
    assert len(named) > 700
    assert {name: places for name, places in named.items() if len(places) > 1} == {}


def test_no_class_has_too_many_methods():
    """Who has more is made of parts, each a class of its own that says what it does."""
    counts = {
        f"{module}:{node.name}": sum(isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body)
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    assert counts["mmrl.protocols.parts:Drafting"] == 4 and counts["mmrl.policies.vlm.policy:VisionLanguagePolicy"] > 20
    assert {name: count for name, count in counts.items() if count > IN_A_CLASS} == {}


def test_every_folder_is_a_package_that_says_what_lives_in_it():
    for folder in {path.parent for path in MODULES.values()} - {ROOT / "tasks"}:
        text = (folder / "__init__.py").read_text()
        assert ast.get_docstring(ast.parse(text)), folder


def test_the_list_of_packages_names_every_folder():
    """Folders that are not on it are missing from a wheel, where nobody looks."""
    listed: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    inits = {module for module, path in MODULES.items() if path.name == "__init__.py"}
    assert sorted(listed) == sorted(inits | {"mmrl.configs"})


def test_other_files_of_the_package_are_named_too():
    """Templates, images, kernels' sources and recipes: each is matched by a pattern of package-data."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    known = set()
    for package, globs in patterns.items():
        parts = package.split(".")
        folder = ROOT.joinpath(*(parts if parts[1:2] not in (["tasks"], ["sims"], ["configs"]) else parts[1:]))
        known |= {path for glob in globs for path in folder.glob(glob)}
    wanted = {
        path
        for folder in ("mmrl", "tasks", "sims", "configs")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".md", ".pyc") and "prebuilt" not in path.parts
    }
    assert wanted - known == set()
