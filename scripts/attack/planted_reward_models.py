"""Faults of reward models. Entries are as in `planted_spans.py`."""

from __future__ import annotations

M = "mmrl/rewards/models/"
IMAGE, VLM = ("rewards/models/test_image_reward.py",), ("rewards/models/test_vlm_reward.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("image_reward: another epsilon", M + "image_reward.py", "layer_norm_eps=1e-6,", "layer_norm_eps=1e-2,", IMAGE),
    ("image_reward: not normalised", M + "image_reward.py", "- MEAN) / STD", "- MEAN)", IMAGE),
    ("image_reward: the last word is read", M + "image_reward.py", "last_hidden_state[:, 0]", "last_hidden_state[:, -1]", IMAGE),
    ("image_reward: padding is read", M + "image_reward.py", "attention_mask=tokens.attention_mask,", "attention_mask=torch.ones_like(tokens.attention_mask),", IMAGE),
    ("image_reward: a ReLU between layers", M + "image_reward.py", '"mlp.layers."), activation=None,', '"mlp.layers."), activation=nn.ReLU,', IMAGE),
    ("image_reward: pixels of ImageNet", M + "image_reward.py", "(0.48145466, 0.4578275, 0.40821073)", "(0.485, 0.456, 0.406)", IMAGE),
    ("vlm_reward: no ReLU between layers", M + "vlm_reward.py", "with_prefix(state, prefix), nn.ReLU,", "with_prefix(state, prefix), None,", VLM),
    ("vlm_reward: the first number of each token", M + "vlm_reward.py", "i if outputs.shape[1] == len(self.tokens) > 1 else 0", "0", VLM),
    ("vlm_reward: mean is added", M + "vlm_reward.py", "(value - mean) / std", "(value + mean) / std", VLM),
    ("vlm_reward: weights of tokens are left out", M + "vlm_reward.py", "scores += weight * (value", "scores += (value", VLM),
    ("vlm_reward: the base's own weights", M + "vlm_reward.py", "        if not trained:\n", "        if trained:\n", VLM),
    ("vlm_reward: the result comes first", M + "vlm_reward.py", 'images.append(sample.prompt.images[0].convert("RGB"))', 'images.insert(0, as_pil(image_of(sample)))', VLM),
    ("vlm_reward: the first head is all", M + "vlm_reward.py", "torch.stack(values).mean(0)", "torch.stack(values)[0]", VLM),
    ("vlm_reward: padded on the left without a word", M + "vlm_reward.py", "hidden[is_token]", "hidden[is_token.roll(1, 1)]", VLM),
    ("vlm_reward: missing weights are drawn", M + "vlm_reward.py", "    if wrong:\n", "    if wrong and False:\n", VLM),
    ("vlm_reward: broken images have a score", M + "vlm_reward.py", "if bool(_generated(sample).isfinite().all())]", "if True]", VLM),
]
