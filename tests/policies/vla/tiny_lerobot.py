"""Tiny policies written by LeRobot itself: random weights, its own processors and statistics."""

from pathlib import Path

import torch
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    SmolVLMConfig,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

SPECIAL = ("<pad>", "</s>", "<unk>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
WORDS = [*SPECIAL, "go", "from", "0.00", "0.30", "0.70"]
CHUNK, PADDED = 6, 8  # actions a plan, numbers an action
STATISTICS = {
    "observation.state": {"mean": torch.tensor([0.4]), "std": torch.tensor([0.5])},
    "action": {"mean": torch.tensor([0.1]), "std": torch.tensor([0.2])},
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


def write(folder: Path, **options) -> SmolVLAPolicy:
    """A SmolVLA in `folder`, and what stands in for its vision-language model beside it."""
    vlm = folder.parent / "vlm"
    write_vlm(vlm)
    config = SmolVLAConfig(
        **FEATURES,
        device="cpu",
        chunk_size=CHUNK,
        n_action_steps=CHUNK,
        max_state_dim=PADDED,
        max_action_dim=PADDED,
        resize_imgs_with_padding=(16, 16),
        num_steps=5,
        num_vlm_layers=4,
        vlm_model_name=str(vlm),
        push_to_hub=False,
        **options,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy = SmolVLAPolicy(config).float().eval()
    stir(policy)
    policy.save_pretrained(folder)
    for processor in make_pre_post_processors(config, dataset_stats=STATISTICS):
        processor.save_pretrained(folder)
    return policy
