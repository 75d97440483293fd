"""An option that means nothing for a job is an unknown key: every recipe is given every key that its job lacks."""

import typing
from pathlib import Path

import pytest

from mmrl.cli.keys import _sections_of, all_keys
from mmrl.config import job, laid_over, validate
from mmrl.errors import UserError
from mmrl.settings import Choice, Section, kind_of
from mmrl.settings.tree import TreeError, read_override, read_yaml

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "configs").rglob("*.yaml"))


@pytest.fixture(scope="module")
def known():
    return all_keys()


def has(section, value, path=()):
    """The keys that a section of this value has or may be given, `*` for names of one's own."""
    for name, field in section.model_fields.items():
        here = (*path, name)
        yield ".".join(here)
        held = None if value is None else getattr(value, name)
        yield from below(field.annotation, held, here)


def below(annotation, held, path):
    if isinstance(held, Section):
        yield from has(type(held), held, path)
    elif isinstance(held, list | tuple):
        for i, item in enumerate(held):
            yield from below(None, item, (*path, str(i)))
    elif typing.get_origin(annotation) is dict:
        for inner, _ in _sections_of(annotation):
            yield from has(inner, None, (*path, "0"))
    elif held is None:
        for inner, step in _sections_of(annotation):
            if step:
                continue
            if issubclass(inner, Choice):
                if not isinstance(inner.model_fields["type"].default, str):
                    continue
                inner = kind_of(inner, {"type": inner.model_fields["type"].default})
            yield from has(inner, None, path)


def test_has_knows_what_a_job_has():
    tree = {"run_dir": "x"}
    found = set(has(job(tree), validate(tree, "x")))
    assert {"rollout.temperature", "algorithm.surrogate.low", "model.lora.rank", "optim.groups.0.lr"} <= found
    assert not {"denoising", "denoising.steps", "algorithm.surrogate.cap", "algorithm.gamma"} & found


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
@pytest.mark.quick(
    "visual_qa_digits",
    "image_digits_flow",
    "manipulation_tabletop",
    "text_sums_masked",
    "video_moving_shapes",
    "visual_games",
)
def test_a_key_that_the_job_does_not_have_is_refused_in_one_line(path, known):
    layers = [tree for _, tree in read_yaml(path)]
    config = validate(laid_over({"run_dir": "x"}, *layers), path.name)
    own = set(has(type(config), config))
    lacking = [key.replace("*", "0") for key in known if key.replace("*", "0") not in own]
    assert len(lacking) > 50
    accepted = []
    for key in lacking:
        try:
            validate(laid_over({"run_dir": "x"}, *layers, read_override(f"{key}=1")), path.name)
        except (UserError, TreeError) as error:
            assert "\n" not in str(error)
            continue
        accepted.append(key)
    assert accepted == []


@pytest.mark.parametrize(
    ("recipe", "override", "message"),
    [
        ("visual_qa_digits", "denoising.steps=3", "unknown key denoising"),
        ("visual_qa_digits", "algorithm.gamma=0.9", "unknown key algorithm.gamma"),
        ("visual_qa_digits", "algorithm.surrogate.hih=0.3", "did you mean algorithm.surrogate.high"),
        ("visual_qa_digits", "algorithm.surrogate={type: reinforce, low: 0.9}", "unknown key algorithm.surrogate.low"),
        ("visual_qa_digits", "rollout.vllm.memory=0.2", "unknown key rollout.vllm"),
        ("visual_qa_digits_warm_start", "rollout.group_size=4", "unknown key rollout.group_size"),
        ("image_digits_flow", "rollout.temperature=0.5", "unknown key rollout.temperature"),
        ("image_digits_flow", "algorithm.terms=[{type: entropy}]", "algorithm.terms.0 (entropy) needs an entropy"),
        ("image_digits_flow", "algorithm.masks=[covariance_clip]", "algorithm.masks.0 (covariance_clip) needs"),
        ("image_digits_flow", "algorithm.type=contrast", "algorithm.type=contrast needs"),
        ("image_digits_flow", "algorithm.level=segment", "decisions in segments"),
        ("manipulation_tabletop_ppo", "algorithm.baseline=none", "unknown key algorithm.baseline"),
        ("manipulation_tabletop_ppo", "rollout.dynamic_sampling={}", "unknown key rollout.dynamic_sampling"),
        ("manipulation_tabletop", "engine.zero_stage=3", "engine.zero_stage=3 does not go with"),
        ("manipulation_tabletop", "optim.groups.critic.lr=1e-3", "optim.groups.critic: this job's model has no"),
        ("manipulation_tabletop_flow", "action.head.likelihood.branching=[2]", "likelihood.branching"),
        (
            "visual_qa_zoom",
            "rollout.extras=[self_corrections]",
            "joined, which model.type=vision_language in conversations (task.environment) does not have",
        ),
    ],
)
def test_refusals_name_the_key_and_the_reason(recipe, override, message):
    tree = laid_over({"run_dir": "x"}, *(tree for _, tree in read_yaml(Path(recipe))), read_override(override))
    with pytest.raises(UserError) as caught:
        validate(tree, recipe)
    assert message in str(caught.value) and "\n" not in str(caught.value)
