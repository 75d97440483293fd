"""Tiny policies written by LeRobot itself: random weights, its own processors and statistics."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from lerobot.policies.pi0 import modeling_pi0
from lerobot.policies.pi0.configuration_pi0 import PI0Config
from lerobot.policies.pi05 import modeling_pi05
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
    SmolVLMConfig,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

SPECIAL = ("<pad>", "</s>", "<unk>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
PLACES = ("0.00", "0.10", "0.30", "0.70")
WORDS = [*SPECIAL, "go", "from", *PLACES]
WORDS += ["Task:", "go,", *(f"{place}," for place in PLACES), "State:", *(f"{i};" for i in range(-1, 256)), "Action:"]
CHUNK, PADDED = 6, 8  # actions a plan, numbers an action
NAMES = ("mean", "std", "q01", "q99")  # pi0.5 is normalised by quantiles
STATISTICS = {
    "observation.state": dict(zip(NAMES, torch.tensor([[0.4], [0.5], [-0.3], [1.0]]), strict=True)),
    "action": dict(zip(NAMES, torch.tensor([[0.1], [0.2], [-0.12], [0.24]]), strict=True)),
}
FEATURES = {
    "input_features": {
        "observation.images.top": PolicyFeature(FeatureType.VISUAL, (3, 2, 2)),
        "observation.state": PolicyFeature(FeatureType.STATE, (1,)),
    },
    "output_features": {"action": PolicyFeature(FeatureType.ACTION, (1,))},
}


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens={
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
    )


def write_vlm(folder: Path) -> None:
    """What stands in for SmolVLM2 on the hub: a configuration and a processor, no weights."""
    SmolVLMConfig(
        text_config={
            "model_type": "llama",
            "vocab_size": len(WORDS),
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "pad_token_id": 0,
        },
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
        },
        image_token_id=3,
        pad_token_id=0,
        scale_factor=2,
    ).save_pretrained(folder)
    SmolVLMProcessor(SmolVLMImageProcessor(), tokenizer(), SmolVLMVideoProcessor()).save_pretrained(folder)


def stir(module: torch.nn.Module) -> None:
    """Everything shall matter, and the velocities shall be about as large as actions."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            scale = 0.1 if parameter.dim() < 2 else parameter[0].numel() ** -0.5
            parameter += scale * torch.randn(parameter.shape, generator=generator)


def write(folder: Path, kind: str, cameras: Sequence[str] = ("top",), *, empty: int = 0) -> PreTrainedPolicy:
    """A policy in `folder`, and what stands in for the hub's files beside it. empty: places for images that LeRobot
    fills itself."""
    config = {"smolvla": smolvla, "pi0": pi0, "pi05": pi05}[kind](folder.parent)
    eyes = {f"observation.images.{name}": FEATURES["input_features"]["observation.images.top"] for name in cameras}
    config.input_features = {**eyes, "observation.state": FEATURES["input_features"]["observation.state"]}
    config.empty_cameras = empty
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy = get_policy_class(kind)(config).float().eval()
    stir(policy)
    policy.save_pretrained(folder)
    for processor in make_pre_post_processors(config, dataset_stats=STATISTICS):
        processor.save_pretrained(folder)
    return policy


@contextmanager
def written(folder: Path, kind: str) -> Iterator[Path]:
    """`folder` with such a policy, while LeRobot's own code has tiny sizes too."""
    with pytest.MonkeyPatch.context() as changed:
        if kind != "smolvla":
            shrink(changed, folder.parent)
        write(folder, kind)
        yield folder


SIZES = {**FEATURES, "device": "cpu", "chunk_size": CHUNK, "n_action_steps": CHUNK, "push_to_hub": False}
SIZES |= {"max_state_dim": PADDED, "max_action_dim": PADDED}


def smolvla(beside: Path) -> SmolVLAConfig:
    write_vlm(beside / "vlm")
    small = {"resize_imgs_with_padding": (16, 16), "num_steps": 5, "num_vlm_layers": 4}
    return SmolVLAConfig(**SIZES, **small, vlm_model_name=str(beside / "vlm"))


def pi0(beside: Path) -> PI0Config:
    """Its processor asks for a tokenizer by the hub's name; see `shrink`."""
    return PI0Config(**SIZES, image_resolution=(16, 16), num_inference_steps=5, dtype="float32")


def pi05(beside: Path) -> PI05Config:
    return PI05Config(**SIZES, image_resolution=(16, 16), num_inference_steps=5, dtype="float32")


def shrink(monkeypatch, beside: Path):
    """LeRobot has three billion parameters of pi0 and pi0.5 in its code, and their tokenizer on the hub."""
    widths = {"gemma_2b": 32, "gemma_300m": 24}
    eyes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    eyes |= {"patch_size": 4, "projection_dim": 32}

    def sizes(variant):
        return modeling_pi0.GemmaConfig(widths[variant], depth=2, mlp_dim=48, num_heads=8, num_kv_heads=1, head_dim=8)

    def smaller(made):
        def build(config):
            words = config.get_text_config()
            words.vocab_size, words.pad_token_id = len(WORDS), 0
            if config is not words:
                config.image_token_index = 3
                for name, value in eyes.items():
                    setattr(config.vision_config, name, value)
            return made(config)

        return build

    tokenizer().save_pretrained(beside / "words")
    usual = AutoTokenizer.from_pretrained

    def read(name, **options):
        return usual(str(beside / "words")) if str(name).startswith("google/paligemma") else usual(name, **options)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", read)
    for module in (modeling_pi0, modeling_pi05):
        monkeypatch.setattr(module, "get_gemma_config", sizes)
        for name in ("PaliGemmaForConditionalGenerationWithPiGemma", "PiGemmaForCausalLM"):
            monkeypatch.setattr(module, name, smaller(getattr(module, name)))
