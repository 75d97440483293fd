"""Image runs through the command line: warm start, training, evaluation, images; and what is refused."""

import json

import pytest
import yaml
from PIL import Image

from mmrl.config import load
from mmrl.job import before_warm_start
from mmrl.settings.recipes import shipped
from tests.helpers.command_line import ROOT, mmrl

RECIPES = sorted(name for name in shipped() if name.startswith("image_"))
TINY = ["threads=1", "evaluation.prompts=20", "task.data.train_size=200"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base recipe and one that starts from it, both cut down to a few steps."""
    folder = tmp_path_factory.mktemp("images")
    base = yaml.safe_load((ROOT / "configs" / "warm_starts" / "digits" / "image_digits_base.yaml").read_text())
    base |= {"steps": 3, "run_dir": str(folder / "base")}
    base["evaluation"] = {"every": 0, "prompts": 20}
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    flow = yaml.safe_load((ROOT / "configs" / "digits" / "image_digits_flow.yaml").read_text())
    flow |= {"steps": 2, "run_dir": str(folder / "flow")}
    flow["model"]["warm_start"] = "base.yaml"
    flow["rollout"] = {"prompts": 4, "group_size": 4}
    flow["denoising"] |= {"steps": 4, "evaluation_steps": 4}
    (folder / "flow.yaml").write_text(yaml.safe_dump(flow))
    return folder


@pytest.fixture(scope="module")
def trained(folder):
    result = mmrl(folder, "train", folder / "flow.yaml", *TINY)
    assert (result.code, result.err) == (0, "")
    return result


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_warm_start_is_run_first_and_started_from(folder, trained):
    assert f"warm start: mmrl train {folder / 'base.yaml'}" in trained.out
    assert metrics(folder / "base")[-1]["step"] == 3
    config = load(folder / "flow" / "config.yaml")
    assert config.model.path == str(folder / "base" / "final") and config.model.warm_start is None


def test_a_dry_run_begins_with_a_warm_start_that_has_ended(folder, trained):
    """And writes nothing: what the run left stays as it is."""
    left = (folder / "flow" / "metrics.jsonl").read_text()
    result = mmrl(folder, "train", folder / "flow.yaml", *TINY, "--dry-run")
    assert (result.code, result.err) == (0, "") and "dry run: one step done" in result.out
    assert "has not been run" not in result.out and "warm start: mmrl train" not in result.out
    assert (folder / "flow" / "metrics.jsonl").read_text() == left
    config = load(folder / "flow.yaml")
    assert before_warm_start(config) == config  # it names the warm start, whose end `run_warm_start` finds


def test_the_metrics_hold_reward_guards_and_an_exact_first_ratio(folder, trained):
    first, last = [row for row in metrics(folder / "flow") if "loss" in row]
    guards = {"guard/out_of_gamut", "guard/sharpness", "guard/diversity", "guard/second_scorer"}
    assert guards | {"reward/classifier_logp", "unscored", "surrogate/divergence"} <= first.keys()
    assert first["unscored"] == 0 and 0 <= first["guard/out_of_gamut"] <= 1
    evaluations = [row for row in metrics(folder / "flow") if "evaluation/accuracy" in row]
    assert [row["step"] for row in evaluations] == [0, 2]
    assert {"evaluation/guard/out_of_gamut", "evaluation/guard/second_scorer"} <= evaluations[0].keys()
    assert "entropy" not in first


def test_grids_before_and_after_are_written(folder, trained):
    for step in (0, 2):
        grid = Image.open(folder / "flow" / "samples" / f"evaluation-{step:06d}.png")
        assert grid.size == (10 * 50, 2 * 50)  # 20 images of 8 pixels, six times as large, a pixel of white around


def test_eval_and_sample_of_the_run(folder, trained):
    result = mmrl(folder, "eval", folder / "flow", folder / "flow.yaml", *TINY)
    assert (result.code, result.err) == (0, "")
    record = json.loads((folder / "flow" / "evaluation.json").read_text())
    after = [row for row in metrics(folder / "flow") if "evaluation/accuracy" in row][-1]
    assert record["evaluation/accuracy"] == after["evaluation/accuracy"]
    result = mmrl(folder, "sample", folder / "flow", folder / "flow.yaml", *TINY, "--count", "6")
    assert (result.code, result.err) == (0, "")
    assert result.out.count("-> an image") == 6
    assert Image.open(folder / "flow" / "samples.png").size == (6 * 50, 50)
    assert (folder / "flow" / "samples.html").read_text().count("<img") == 6


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_a_configuration(name):
    config = load(name)
    kinds = ("diffusion", "autoregressive_image", "discrete_diffusion", "few_step_diffusion", "prompt_rewriting")
    assert config.model.type in kinds
    assert config.task.type == "image_generation"
    if config.model.warm_start is not None:
        load(config.model.warm_start)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["denoising.likelihood.transition=euler"], "denoising.likelihood.transition.type=euler is unknown"),
        (["denoising.stepps=3"], "unknown key denoising.stepps; did you mean denoising.steps?"),
        (["denoising.likelihood.window={type: sliding, sise: 3}"], "did you mean denoising.likelihood.window.size?"),
        (["denoising.likelihood={transition: cps, window: {last: 4}}"], "reaches step 3, which has std 0"),
        (["algorithm.terms=[{type: entropy, coefficient: 0.1}]"], "algorithm.terms.0 (entropy) needs an entropy"),
        (["algorithm.terms=[{type: kl, estimator: k3, coefficient: 0.1}]"], "algorithm.terms.0 (kl) needs a KL"),
        (["algorithm.type=contrast"], "algorithm.type=contrast needs decisions that are errors of implicit policies"),
        (["denoising.likelihood.branching=[3]"], "set rollout.group_size=3"),
        (["algorithm.level=segment"], "algorithm.type=grpo needs decisions in segments"),
        (["denoising.likelihood=contrast", "algorithm={type: contrast, nft_beta: 0}"], "algorithm.nft_beta"),
        (["task.rewards=[{name: jpg}]"], "unknown reward 'jpg'"),
        (["model.path=somewhere"], "path and warm_start are set, but a model comes from only one"),
        (["model.warm_start=none.yaml"], "no configuration file"),
    ],
)
def test_what_is_refused_is_refused_in_one_line(folder, trained, tmp_path, overrides, message):
    result = mmrl(tmp_path, "train", folder / "flow.yaml", f"run_dir={tmp_path / 'run'}", *TINY, *overrides)
    assert result.code == 2 and result.err.count("\n") == 1 and message in result.err, result.err
    assert not (tmp_path / "run").exists()
