"""Faults of recipes by name, of controls, and of former names. Each entry has a name, a file, a string that occurs once
in the file, its replacement, and the tests that should then fail."""

from __future__ import annotations

R, M, C, K = "mmrl/settings/recipes.py", "mmrl/moved.py", "mmrl/cli/control.py", "mmrl/config.py"
RECIPES, MOVED, CONTROLS = ("settings/test_recipes.py",), ("test_moved.py",), ("cli/test_control.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("recipes: the first folder called configs counts", R, "positions[-1] + 1", "kinds[0] + 2", RECIPES),
    ("recipes: a name comes before a file", R, "if path.is_file():\n        return path\n    if", "if", RECIPES),
    ("recipes: a path may end with a name", R, "path.name == str(path) and", "", RECIPES),
    ("recipes: a former control is not told", R, "if name.endswith(FORMER_CONTROL):", "if False:", RECIPES),
    ("recipes: a name hides a file beside it", R, "if not path.is_file() and name in", "if name in", RECIPES),
    ("recipes: the default run directory wins", K, '{"run_dir": recipes.run_dir(path), **laid_over(*trees)}',
     '{**laid_over(*trees), "run_dir": recipes.run_dir(path)}', RECIPES),
    ("recipes: a warm start is seen from the last file", K, "_with_warm_start(tree, file.parent) for file, tree in",
     "_with_warm_start(tree, path.parent) for file, tree in", RECIPES),
    ("control: the simulator pays on", C, '"algorithm.simulator_reward=0.0"', '"algorithm.simulator_reward=1.0"',
     CONTROLS),
    ("control: the environment pays on", C, "if not shaper.uses_environment_rewards", "if True", CONTROLS),
    ("control: every shaper goes", C, "plain(shaper) for shaper in without_rewards", "plain(shaper) for shaper in without_rewards[:0]",
     CONTROLS),
    ("control: it writes over the run", C, "{config.run_dir}_control", "{config.run_dir}", CONTROLS),
    ("control: demonstrations have one", C, "if from_demonstrations or", "if", CONTROLS),
    ("milestones: it is not said who pays", "mmrl/terms/shapers/turns.py",
     'uses_environment_rewards: ClassVar[bool] = True\n    type: str = "milestones"',
     'uses_environment_rewards: ClassVar[bool] = False\n    type: str = "milestones"', CONTROLS),
    ("moved: imports are not told", M, "sys.meta_path.append(FormerModules())", "pass", MOVED),
    ("moved: a class in a module that stayed is not told", M, 'if colon and name in tables["classes"]:', "if False:",
     MOVED),
    ("moved: a class keeps the module's former name", M, 'tables["modules"][module] + colon + member',
     'module + colon + member', MOVED),
    ("moved: what an import lacks is not told", M, 'hint(f"{match[2]}:{match[1]}")', '""', MOVED),
    ("settings: what is loaded is the module", "mmrl/settings/section.py",
     "    return vars(importlib.import_module(module))[name]\n", "    return importlib.import_module(module)\n",
     ("test_trainer.py", "test_config.py")),
]
