"""A pipeline that mmrl does not know: its class and its family are a user's own, in one file, and nothing else."""

import json

import pytest
from diffusers import AuraFlowPipeline

from mmrl.errors import UserError
from mmrl.policies.diffusion.families.images import AuraFlow
from mmrl.policies.diffusion.memory_estimate import parts
from mmrl.policies.diffusion.pipelines import load
from mmrl.policies.diffusion.settings import DiffusionModel
from tests.helpers.tiny_pipelines import build
from tests.whole_runs.parts import IMAGES, metrics, timeless, train

HERE = "tests.policies.diffusion.test_own_family"
pytestmark = pytest.mark.usefixtures("alone")


class OwnPipeline(AuraFlowPipeline):
    """Not among diffusers' classes."""


class OwnFamily(AuraFlow):
    pipeline_class = OwnPipeline


class Later(OwnFamily):
    """Its network is told half of the time."""

    def _inputs(self, time, texts, size, guidance):
        return super()._inputs(0.5 * time, texts, size, guidance)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same weights as diffusers' pipeline and as our own."""
    known, own = (tmp_path_factory.mktemp("families") / name for name in ("known", "own"))
    for folder in (known, own):
        build("aura_flow", folder)
    index = json.loads((own / "model_index.json").read_text()) | {"_class_name": "OwnPipeline"}
    (own / "model_index.json").write_text(json.dumps(index))
    return known, own


def options(path, family=None):
    named = [] if family is None else [f"model.family={HERE}:{family}"]
    return ["model.build=null", f"model.path={path}", *named, "denoising.resolution=16", "steps=2", "rollout.prompts=2"]


def losses(folder):
    return [(row["loss"], row["grad_norm"]) for row in timeless(metrics(folder)) if "loss" in row]


def test_it_trains_as_the_family_that_it_inherits_from(folders, tmp_path):
    known, own = folders
    train(tmp_path / "known", *options(known), base=IMAGES)
    train(tmp_path / "own", *options(own, "OwnFamily"), base=IMAGES)
    assert losses(tmp_path / "known") == losses(tmp_path / "own") and losses(tmp_path / "own")[0][1] > 0
    weights = "final/transformer/diffusion_pytorch_model.safetensors"
    assert (tmp_path / "known" / weights).read_bytes() == (tmp_path / "own" / weights).read_bytes()
    saved = json.loads((tmp_path / "own/final/model_index.json").read_text())
    assert saved["_class_name"] == "OwnPipeline"
    load(str(tmp_path / "own/final"), DiffusionModel(family=f"{HERE}:OwnFamily"))


def test_what_it_does_itself_is_what_runs(folders, tmp_path):
    _, own = folders
    train(tmp_path / "own", *options(own, "OwnFamily"), base=IMAGES)
    train(tmp_path / "later", *options(own, "Later"), base=IMAGES)
    assert losses(tmp_path / "own")[0] != losses(tmp_path / "later")[0]


def test_what_is_refused(folders):
    _, own = folders
    with pytest.raises(
        UserError, match="is a OwnPipeline, which is not supported; .* model.family=package.module:Class"
    ):
        load(str(own), DiffusionModel())
    for named, why in (
        (f"{HERE}:OwnPipeline", "is not a subclass of mmrl.policies.diffusion.families.pipeline:Pipeline"),
        (f"{HERE}:Nobody", "cannot be imported: "),
        ("nowhere:Nobody", "cannot be imported: "),
    ):
        with pytest.raises(UserError, match=why) as error:
            load(str(own), DiffusionModel(family=named))
        assert "\n" not in str(error.value)


def test_its_memory_is_estimated(folders):
    known, own = folders
    name, networks, encoders = parts(str(own), own_class=f"{HERE}:OwnFamily")
    assert name == "OwnPipeline" and (networks, encoders) == parts(str(known))[1:]
