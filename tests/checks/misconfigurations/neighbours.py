"""Thirty more misconfigurations, of the kinds beside the sixty, and what `mmrl check` has to name in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.checks.misconfigurations import generation, questions, robots
from tests.checks.misconfigurations.parts import Case, Written, row, write_lines

Tree = dict[str, Any]


def asked(name: str, tree: Tree, *named: Any, in_config: bool = True, **options: Any) -> Case:
    """A case of questions with some keys changed."""
    return Case(name, "questions", questions.keys(tree), named, in_config=in_config, **options)


def rows(name: str, change: Callable[[Tree, int], Any], tree: Tree, *named: Any, **options: Any) -> Case:
    """A case of questions with changed rows."""
    return Case(name, "questions", lambda folder: questions.written(folder, change, tree, both=True), named, **options)


def robot(name: str, tree: Tree, *named: Any, changed: str = robots.AS_IT_IS, **options: Any) -> Case:
    """A case of the user's environment with some keys changed."""
    return Case(name, "robots", robots.environment(name, changed, tree), named, **options)


def shown(name: str, tree: Tree, *named: Any, **options: Any) -> Case:
    """A case of prompts for a pipeline with some keys changed."""
    return Case(name, "generation", generation.changed(name, tree), named, **options)


def drop(name: str) -> Callable[[Tree, int], Tree]:
    return lambda one, place: {key: value for key, value in one.items() if key != name} if place == 4 else one


def listed(one: Tree, place: int) -> Tree:
    return one | {"answer": [one["answer"], {"colour": 1}]} if place == 3 else one


def sentence(one: Tree, place: int) -> Tree:
    return one | {"answer": f"the {one['answer']} one, as one sees"}


def elsewhere(one: Tree, place: int) -> Tree:
    return one | {"images": [f"photos/{Path(one['images'][0]).name}"]} if place == 2 else one


def not_an_image(folder: Path) -> Written:
    made = questions.written(folder)
    (folder / "images" / "5.png").write_text("<html>404 not found</html>")
    return made


def empty_file(folder: Path) -> Written:
    made = questions.written(folder)
    write_lines(folder / "train.jsonl", [])
    return made


def prompts_absent(folder: Path) -> Written:
    made = generation.written(folder, "prompts_absent")
    (folder / "train.txt").unlink()
    return made


def questions_absent(folder: Path) -> Written:
    made = questions.written(folder)
    (folder / "train.jsonl").unlink()
    return made


def action_of_another_size(folder: Path) -> Written:
    """Demonstrations of two numbers, an environment of three."""
    root = robots.write_demonstrations(folder / "demonstrations")
    made = robots.supervised(folder, "action_of_another_size", root)
    robots.base(folder, "action_of_another_size", THREE)
    return made


def statistics_of_another_size(folder: Path) -> Written:
    held = {"own": robots.quantiles(-1.0, 1.0, size=7)}
    return robots.statistics("statistics_of_another_size", held)(folder)


THREE = """
class Own(Base):
    action_space = Box(-1, 1, (3,), np.float32)

    def step(self, action):
        return super().step(np.asarray(action)[:2])
"""
DISCRETE = """
class Own(Base):
    action_space = gymnasium.spaces.Text(5)
"""

NEIGHBOURS: tuple[Case, ...] = (
    # names of other suites' options
    asked("beta_of_trl", {"algorithm": {"beta": 0.04}}, "algorithm.beta", ("kl", "terms")),
    asked("generations_of_trl", {"rollout": {"num_generations": 8}}, "num_generations", "rollout.group_size"),
    asked("learning_rate_of_trl", {"optim": {"learning_rate": 1e-6}}, "learning_rate", "optim.lr"),
    asked("completion_of_trl", {"rollout": {"max_completion_length": 64}}, "max_completion_length", "max_response_len"),
    asked("rollout_n_of_verl", {"rollout": {"n": 5}}, "rollout.n", "rollout.group_size"),
    asked("actor_of_verl", {"actor_rollout_ref": {"actor": {}}}, "actor_rollout_ref"),
    robot("chunk_size_of_lerobot", {"action": {"chunk_size": 8}}, "chunk_size", "action.chunk", in_config=True),
    robot("steps_of_lerobot", {"action": {"n_action_steps": 2}}, "n_action_steps", "action.", in_config=True),
    # sizes and values
    asked("micro_batch_of_zero", {"engine": {"micro_batch": 0}}, "engine.micro_batch"),
    asked("prompts_zero", {"rollout": {"prompts": 0}}, "rollout.prompts"),
    asked("context_shorter_than_prompts", {"rollout": {"max_prompt_length": 8}}, "max_prompt_length", in_config=False),
    asked(
        "adapter_matches_nothing",
        {"model": {"lora": {"rank": 4, "targets": ["nope_proj"]}}},
        "lora",
        "nope_proj",
        in_config=False,
    ),
    asked(
        "unknown_reward", {"task": {"rewards": [{"name": "exact_mach"}]}}, "exact_mach", "exact_match", in_config=False
    ),
    asked("unknown_algorithm", {"algorithm": {"type": "gropo"}}, "gropo"),
    # rows
    rows("row_without_its_image", drop("images"), {}, row(4), "image"),
    rows("row_without_its_answer", drop("answer"), {}, row(4), "answer"),
    rows("answer_is_a_list_of_things", listed, {}, "gold", row(3)),
    rows("golds_are_sentences_for_numbers", sentence, questions.with_reward("numeric"), "numeric"),
    rows("image_in_another_folder", elsewhere, {}, row(2), "images"),
    Case("page_saved_as_image", "questions", not_an_image, ("5.png",)),
    Case("file_without_rows", "questions", empty_file, ("train.jsonl",)),
    Case("file_of_questions_absent", "questions", questions_absent, ("task.data.train", "train.jsonl")),
    # images by diffusion
    Case("file_of_prompts_absent", "generation", prompts_absent, ("task.data.train", "train.txt")),
    shown(
        "steps_of_diffusers",
        {"denoising": {"num_inference_steps": 4}},
        "num_inference_steps",
        "denoising.steps",
        in_config=True,
    ),
    shown("adapter_of_another_model", {"model": {"lora": {"rank": 4, "targets": ["q_proj"]}}}, "lora", "q_proj"),
    # robots
    robot("unknown_environment", {"task": {"options": {"env": "PickCubeV9-v1"}}}, "PickCubeV9"),
    robot("unknown_task", {"task": {"tasks": ["pick_the_cube"]}}, "pick_the_cube", "task"),
    robot("actions_of_text", {}, "actions must be a Box", changed=DISCRETE),
    Case("action_of_another_size", "robots", action_of_another_size, ("action", "2", "3")),
    Case("statistics_of_another_size", "robots", statistics_of_another_size, ("statistics", "7", "2")),
)
