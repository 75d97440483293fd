"""LoRA weights of peft, flow_grpo and diffusers as starts: predictions as in the library that wrote them."""

import shutil

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from mmrl.errors import UserError
from mmrl.policies.diffusion import pipelines
from mmrl.policies.diffusion.settings import DiffusionModel
from tests.policies.diffusion.test_pipelines import answer, open_pipeline

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["attn.to_q", "attn.to_v"], "init_lora_weights": False}


@pytest.fixture
def written(folder_of, shared_family, tmp_path):
    """Writes adapters in a form; returns their folder and the prediction of the pipeline that has them."""

    def write(form):
        torch.manual_seed(3)
        pipe, folder = open_pipeline(folder_of("sd3")), tmp_path / form
        if form == "peft":
            get_peft_model(pipe.transformer, LoraConfig(**LORA)).save_pretrained(folder / "lora")
        else:
            pipe.transformer.add_adapter(LoraConfig(**LORA))
            layers = get_peft_model_state_dict(pipe.transformer)
            alphas = {"transformer_lora_adapter_metadata": pipe.transformer.peft_config["default"].to_dict()}
            StableDiffusion3Pipeline.save_lora_weights(folder, transformer_lora_layers=layers, **alphas)
        return folder, answer(type(shared_family("sd3"))(pipe, "")).detach()

    return write


def start(path, base, **more):
    return pipelines.load(str(path), DiffusionModel(base=None if base is None else str(base), **more))


@pytest.mark.parametrize("form", ["peft", "diffusers"])
def test_predictions_are_those_of_the_library_that_wrote_it(form, written, folder_of, shared_family, tmp_path):
    folder, expected = written(form)
    family = start(folder, folder_of("sd3"))
    assert (expected - answer(shared_family("sd3"))).abs().max() > 1e-2
    torch.testing.assert_close(answer(family).detach(), expected, atol=1e-5, rtol=1e-5)
    assert all(p.requires_grad == ("lora_" in n) for n, p in family.module.named_parameters())
    family.save(tmp_path / "saved", family.module.state_dict())
    pipe = open_pipeline(folder_of("sd3"))
    pipe.load_lora_weights(tmp_path / "saved")
    torch.testing.assert_close(answer(type(family)(pipe, "")).detach(), expected, atol=1e-5, rtol=1e-5)


def test_what_is_refused(written, folder_of, tmp_path):
    folder, _ = written("diffusers")
    file = folder / "pytorch_lora_weights.safetensors"
    with pytest.raises(UserError, match="do not name their base pipeline; set model.base"):
        start(folder, None)
    with pytest.raises(UserError, match="model.base=.*, but model.path=.* has no LoRA weights .*leave model.base out"):
        start(folder_of("sd3"), folder_of("sd3"))
    with pytest.raises(UserError, match="not|no LoRA"):
        start(file, folder_of("sd15"))
    state = load_file(file)
    save_file(state | {"text_encoder.x.lora_A.weight": torch.ones(1)}, tmp_path / "both.safetensors")
    with pytest.raises(UserError, match="both.safetensors has LoRA weights for a text encoder too"):
        start(tmp_path / "both.safetensors", folder_of("sd3"))
    save_file(state | {"transformer.none.lora_A.weight": torch.ones(1)}, tmp_path / "more.safetensors")
    with pytest.raises(UserError, match="has weights for none, which the network of .* does not have"):
        start(tmp_path / "more.safetensors", folder_of("sd3"))
    save_file({"model.x": torch.ones(1)}, tmp_path / "whole.safetensors")
    (tmp_path / "whole.ckpt").write_bytes(b"x")
    for name in ("whole.safetensors", "whole.ckpt"):
        with pytest.raises(UserError, match="is a full model in a single file") as caught:
            start(tmp_path / name, None)
        made = f"from_single_file('{tmp_path / name}').save_pretrained('{tmp_path / 'whole'}')"
        assert made in str(caught.value) and "\n" not in str(caught.value)
    (tmp_path / "whole.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match="whole.gguf has quantised weights, which cannot be trained"):
        start(tmp_path / "whole.gguf", None)
    shutil.rmtree(folder)
