"""What encoders say of prompts, written by `mmrl embed`: the same conditions without the encoders."""

import json

import pytest
import torch
import yaml
from PIL import Image

from mmrl.build import build_policy, build_task
from mmrl.config import load
from mmrl.errors import UserError
from mmrl.policies.diffusion import embeddings, pipelines
from mmrl.policies.diffusion.embeddings import Embeddings
from mmrl.policies.diffusion.family import ConditionInputs
from mmrl.policies.diffusion.settings import DiffusionModel
from mmrl.policies.settings import LoRA
from tests.helpers.command_line import mmrl

PROMPTS = ["two red cats on a box", "7", "a blue circle"]
LORA = LoRA(rank=2, alpha=4.0)


@pytest.fixture(scope="module")
def written(folder_of, tmp_path_factory):
    """A recipe with LoRA and guidance on a tiny Stable Diffusion 3, and what `mmrl embed` wrote of its prompts."""
    folder = tmp_path_factory.mktemp("embedded")
    for name, lines in (("train", PROMPTS[:2]), ("held", PROMPTS[2:])):
        (folder / f"{name}.txt").write_text("\n".join(lines))
    tree = {
        "run_dir": str(folder / "run"),
        "model": {"type": "diffusion", "path": str(folder_of("sd3")), "lora": {"rank": 2, "alpha": 4.0}},
        "task": {
            "type": "image_generation",
            "data": {"type": "prompts", "train": str(folder / "train.txt"), "eval": str(folder / "held.txt")},
            "rewards": [{"name": "random"}],
            "accuracy": {"name": "random"},
        },
        "rollout": {"prompts": 2, "group_size": 2},
        "denoising": {"steps": 2, "evaluation_steps": 2, "guidance": 3.0, "negative_prompt": "blurred"},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree))
    done = mmrl(folder, "embed", folder / "recipe.yaml", "--out", folder / "said")
    assert done.code == 0, done.err
    assert "4 prompts written" in done.out  # three prompts, and what guidance leads away from
    return folder


def family_of(folder_of, written, **options):
    model = DiffusionModel(lora=LORA, **options)
    return pipelines.load(str(folder_of("sd3")), model)


def test_conditions_are_those_of_the_encoders(folder_of, written):
    whole = family_of(folder_of, written)
    without = family_of(folder_of, written, embeddings=str(written / "said"))
    assert without.pipe.text_encoder is None and without.pipe.text_encoder_3 is None
    asked = [ConditionInputs(text) for text in (*PROMPTS, "blurred")]
    for one, other in zip(without.encode(asked), whole.encode(asked), strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_images_and_likelihoods_are_the_same_without_encoders(written):
    """Through the job's own path, with guidance, in rollouts, replay and evaluation."""
    found = []
    for more in ([], [f"model.embeddings={written / 'said'}"]):
        config = load(written / "recipe.yaml", more)
        task = build_task(config)
        torch.manual_seed(0)  # of the adapters
        policy = build_policy(config, task)
        prompts = [task.train[0], task.train[1]]
        batch = policy.rollout(prompts, 2, [1, 2, 3, 4])
        made = policy.respond([task.evaluation[0]], [5])
        found.append((policy.replay(batch, policy.module).logp, batch.samples[0].image, made[0].image))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_prompt_that_was_not_embedded_is_named(folder_of, written):
    family = family_of(folder_of, written, embeddings=str(written / "said"))
    with pytest.raises(UserError, match=r"prompt 'a green box' is not in model.embeddings=.*mmrl embed"):
        family.encode([ConditionInputs("a green box")])


def test_another_token_limit_is_refused(folder_of, written):
    with pytest.raises(UserError, match=r"was written with text_tokens=256, but this job has 20; write it again"):
        family_of(folder_of, written, embeddings=str(written / "said"), text_tokens=20)


def test_another_pipeline_is_refused(written):
    with pytest.raises(
        UserError, match=r"written with pipeline=StableDiffusion3Pipeline, but this job has FluxPipeline"
    ):
        Embeddings(str(written / "said"), "FluxPipeline", 256)


def test_a_folder_without_embeddings_is_refused(folder_of, written, tmp_path):
    with pytest.raises(UserError, match=r"has no embeddings.json; write the folder with mmrl embed"):
        family_of(folder_of, written, embeddings=str(tmp_path))


def test_a_damaged_file_is_one_line(folder_of, written, tmp_path):
    told = json.loads((written / "said" / "embeddings.json").read_text())
    (tmp_path / "embeddings.json").write_text(json.dumps(told))
    (tmp_path / "embeddings-00000.safetensors").write_bytes(b"nothing")
    family = family_of(folder_of, written, embeddings=str(tmp_path))
    with pytest.raises(UserError, match=r"embeddings-00000.safetensors cannot be read"):
        family.encode([ConditionInputs("7")])


def test_training_the_whole_network_needs_its_encoders(folder_of, written):
    with pytest.raises(UserError, match=r"text encoders are not loaded, .* set model.lora"):
        pipelines.load(str(folder_of("sd3")), DiffusionModel(embeddings=str(written / "said")))


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        ("visual_qa_digits", "vision_language"),
        ("image_digits_rewritten", "prompt_rewriting"),
        ("image_digits_few_step", "few_step_diffusion"),
    ],
)
def test_other_models_are_refused(written, recipe, kind):
    done = mmrl(written, "embed", recipe, "--out", written / "other")
    assert done.code == 2 and f"mmrl embed is for model.type=diffusion; this job has model.type={kind}" in done.err


def test_encoders_visit_the_device_once_a_file(folder_of, written, tmp_path, monkeypatch):
    family, visits = family_of(folder_of, written), []
    encode = family.encode
    monkeypatch.setattr(family, "encode", lambda asked, shape: visits.append(len(asked)) or encode(asked, shape))
    monkeypatch.setattr(embeddings, "PER_FILE", 3)
    asked = [ConditionInputs(text) for text in ("a", "b", "c", "d", "a")]
    shapes = [(4, 8, 8), (4, 4, 4), (4, 8, 8), (4, 4, 4), (4, 8, 8)]  # which words do not depend on
    assert embeddings.write(family, zip(asked, shapes, strict=True), tmp_path) == 4
    assert visits == [3, 1] and len(list(tmp_path.glob("*.safetensors"))) == 2
    found = Embeddings(str(tmp_path), "StableDiffusion3Pipeline", 256).find([ConditionInputs("d")], (4, 8, 8))[0]
    (own,) = encode([ConditionInputs("d")], (4, 8, 8))
    assert all(torch.equal(found[name], own[name].cpu()) for name in own)


def test_images_are_encoded_with_those_of_their_size(tmp_path):
    """A family of its own, which says what it was asked."""

    class Recorder:
        pipe, text_tokens = object(), None

        def encode(self, asked, shape):
            told.append(([one.text for one in asked], shape))
            return [{"source": torch.full(shape, float(ord(one.text)))} for one in asked]

    told = []
    images = (Image.new("RGB", (2, 2)),)
    small, large = (1, 2, 2), (1, 4, 4)
    asked = [
        (ConditionInputs("a"), small),
        (ConditionInputs("b", images, "p"), large),
        (ConditionInputs("c", images, "p"), small),
    ]
    asked += [(ConditionInputs("d"), large), (ConditionInputs("e", images, "p"), large)]
    embeddings.write(Recorder(), asked, tmp_path)
    assert told == [(["a", "c", "d"], small), (["b", "e"], large)]
    kept = Embeddings(str(tmp_path), "object", None)
    (found,) = kept.find([ConditionInputs("e", images, "p")], large)
    assert found["source"].shape == large and found["source"][0, 0, 0] == ord("e")
