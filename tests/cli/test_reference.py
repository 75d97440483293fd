"""What `mmrl config` and `mmrl methods` know: every key has a meaning, every method a test; messages name real keys."""

import ast
import re
from pathlib import Path

import pytest

from mmrl.algorithms.surrogates.surrogate import Clip
from mmrl.cli.keys import all_keys, describe_keys
from mmrl.cli.methods import (
    RECOMMENDED,
    class_variable,
    describe_method,
    describe_methods,
    first_sentence,
    methods,
    rewards,
)
from mmrl.config import Config
from mmrl.errors import UserError
from mmrl.settings import option
from mmrl.sims.registry import SIMULATORS

ROOT = Path(__file__).parents[2]
SECTIONS = (*Config.model_fields, "denoising", "action")
KEY = re.compile(rf"(?<![\w.])(?:{'|'.join(SECTIONS)})(?:\.[a-z_]+(?:\.[0-9*]+)?)+(?==|\b)")


FREE = {"model.processor", "task.options"}  # whose keys are another library's
TENSORS = {"model.layers", "model.pth", "action.mean"}  # names of tensors and their files, not keys


@pytest.fixture(scope="module")
def known():
    return all_keys()


def test_every_key_has_a_description(known):
    lacking = [path for path, meanings in known.items() for m in meanings if not m.field.description]
    assert lacking == []


def test_every_method_has_a_sentence_and_a_test_that_exists():
    for base, name, kind in methods():
        assert first_sentence(kind), (base.title, name)
        named = class_variable(kind, "test")
        assert named == "" or (ROOT / named).exists(), (base.title, name, named)
        if base.title in ("algorithm", "surrogate", "loss term", "advantage shaper", "mask", "transition"):
            assert named, (base.title, name)


class Half(Clip):
    """Half of the clipped objective. A class of a user's own."""

    share: float = option(0.5, "what the objective is multiplied by", gt=0)


def test_every_method_is_described():
    """Also those with options that must be given, on which their needs depend."""
    described = {method[1]: describe_method(*method) for method in methods()}
    assert all(lines[0].startswith(f"{name} (") for name, lines in described.items())
    assert "  cost: no forward pass of its own" in described["stratified"]
    decisions = "  decisions: text token, action token, step of an action's flow, action"
    assert decisions in described["distillation"]  # the algorithm


def test_a_class_of_ones_own_is_described():
    lines = describe_methods(f"{__name__}:Half")
    assert lines[0] == f"{__name__}:Half (surrogate, {__name__}:Half)"
    assert "    share (default 0.5): what the objective is multiplied by" in lines
    assert any(line.startswith("  decisions: text token") for line in lines)
    assert not any(line.startswith("  test: ") for line in lines)


def test_what_is_no_method_is_refused():
    with pytest.raises(UserError, match="UserError is not a method; let it inherit from one of Algorithm, Surrogate"):
        describe_methods("mmrl.errors:UserError")


def test_the_list_begins_with_ten_that_are_recommended_and_exist():
    first = describe_methods(None)[:12]
    shipped = {(base.title, name) for base, name, _ in methods()}
    assert first[0] == "recommended, to begin with:" and first[11] == ""
    assert len(RECOMMENDED) == 10 and set(RECOMMENDED) <= shipped
    assert [line.split()[0] for line in first[1:11]] == [name for _, name in RECOMMENDED]
    assert "  recommended: long runs: the policy stays near the one that it started from" in describe_methods("kl")


def test_reconstructed_methods_are_marked():
    lines = describe_methods(None)
    (bread,) = [line for line in lines if line.startswith("  guided_prefixes ")]
    (clip,) = [line for line in lines if line.startswith("  clip ") and "several updates" not in line]
    assert bread.endswith("(reconstructed)") and not clip.endswith("(reconstructed)")


COMPLETE = (
    "algorithm", "surrogate", "baseline", "transform of rewards", "score of ranks", "scale of advantages", "components",
    "loss term", "advantage shaper", "mask", "view", "prompt sampler", "source", "optimizer",
)  # fmt: skip


def test_every_method_has_an_equation_a_source_and_a_test():
    found = [(base.title, name, kind) for base, name, kind in methods() if base.title in COMPLETE]
    assert {title for title, _, _ in found} == set(COMPLETE)
    lacking = [
        (t, n, word)
        for t, n, kind in found
        for word in ("equation", "source", "test")
        if not class_variable(kind, word)
    ]
    assert lacking == []


def test_the_test_of_a_method_names_it():
    """A file that holds neither the method's key nor its class does not pin it. GRPO is what every joint trains by
    default."""
    missing = []
    for base, name, kind in methods():
        if base.title in COMPLETE and name != "grpo":
            text = (ROOT / class_variable(kind, "test")).read_text()
            if not re.search(rf"\b({re.escape(name)}|{kind.__name__})\b", text):
                missing.append((base.title, name, class_variable(kind, "test")))
    assert missing == []


def test_decisions_and_cost_follow_from_what_a_method_needs():
    def said(name):
        return "\n".join(describe_methods(name))

    tokens = "decisions: text token, masked token, noised token, code of an image, word or code"
    assert f"{tokens}\n" in said("token_baseline")
    assert "before the advantages" in said("token_baseline")
    assert f"{tokens}, action token, action\n" in said("entropy_redistribution")
    assert "under the reference" in said("self_process") and "one more response per prompt" in said("greedy")
    assert "every view" in said("view") and "micro-batches that hold whole groups" in said("preference")
    assert "cost: no forward pass of its own" in said("rank")


def test_a_simulator_says_its_options(monkeypatch):
    lines = describe_methods("gymnasium")
    assert lines[0] == "gymnasium (simulator, mmrl.sims.gymnasium:GymnasiumSimulator)"
    assert lines[-1].startswith("  task.options: env, image='render', state=None, instruction='', mission=None, ")
    assert any(line.startswith("  success: the key in info that says whether the task is solved") for line in lines)
    assert "  ogbench            mmrl methods ogbench explains its task.options" in describe_methods(None)
    monkeypatch.setitem(SIMULATORS, "gymnasium", "metaworld_that_is_absent:Class")
    with pytest.raises(UserError, match="^simulator gymnasium=metaworld_that_is_absent:Class: no such object"):
        describe_methods("gymnasium")


def test_every_reward_says_what_it_is():
    for name, made in rewards().items():
        assert len(made.__doc__ or "") > 20, name
    listed = "\n".join(describe_methods(None))
    assert (
        "reward:" in listed
        and "  boxes_matched      Builds a reward, 0 to 1: all boxes of the answer are matched with the gold boxes"
        in listed
    )
    said = "\n".join(describe_methods("abstention"))
    assert "guessing does not pay" in said
    assert "wrong: 'float' = -1.0" in said
    with pytest.raises(UserError, match="did you mean majority"):
        describe_methods("majorty")


def test_a_key_is_told_with_unit_default_bounds_and_jobs():
    said = "\n".join(describe_keys("rollout.temperature"))
    assert (
        "default 1.0" in said
        and "gt=0" in said
        and "vision_language x grpo|ppo|contrast|matching|reward_gradient" in said
    )
    assert "steps" in "\n".join(describe_keys("optim.hold_steps"))
    assert len(describe_keys("optim")) == sum(path.startswith("optim.") for path in all_keys()) > 10
    with pytest.raises(UserError, match="did you mean rollout.temperature"):
        describe_keys("rollout.temprature")


def test_a_method_is_told_with_equation_source_and_options():
    said = "\n".join(describe_methods("cispo"))
    assert "-clamp(r, 1 - low, 1 + high) A dlogp" in said and "2506.13585" in said and "high (default 0.28)" in said
    with pytest.raises(UserError, match="did you mean cispo"):
        describe_methods("cisp")


def texts(path):
    """The string constants of a module that are not docstrings; what is filled in stands as *."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(v.value if isinstance(v, ast.Constant) else "*" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value


def test_messages_name_keys_that_exist(known):
    wrong = []
    for folder in ("mmrl", "tasks", "sims"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for text in texts(path):
                for key in KEY.findall(text):
                    free = key.rpartition(".")[0] in FREE or key in TENSORS or key.endswith("*")
                    if not free and key not in known and not any(k.startswith(f"{key}.") for k in known):
                        wrong.append(f"{path.relative_to(ROOT)}: {key}")
    assert sorted(set(wrong)) == []
