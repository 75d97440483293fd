"""Clips through the processor, the model and replay, in both generations of the tiny models."""

import math
from dataclasses import replace

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from mmrl.errors import UserError
from mmrl.policies.vlm.policy import VisionLanguagePolicy
from mmrl.policies.vlm.prompts import chat
from mmrl.policies.vlm.tiny_qwen import Sizes, write
from mmrl.prompts.counterfactual_views import ShuffledFrames
from mmrl.rollouts import Prompt, Video
from mmrl.tasks.visual_qa.data.videos import VideosSource
from mmrl.tasks.visual_qa.tiny.videos import build_tokenizer

SOURCE = VideosSource("train", size=12, seed=0)


@pytest.fixture(scope="module", params=["2.5", "3"])
def policy(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    write(folder, build_tokenizer(), Sizes(request.param, width=64, vision_width=64, rope=(4, 6, 6)), 0)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return VisionLanguagePolicy(model, AutoProcessor.from_pretrained(folder), max_response_length=5)


def alone(policy, prompt, response):
    """[token] log-probabilities by the model itself, of one prompt as transformers' own processor reads it."""
    (clip,) = prompt.videos
    content = [{"type": "video"}, {"type": "text", "text": prompt.text}]
    text = policy.tokens.processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    inputs = policy.tokens.processor(
        text=[text],
        videos=[list(clip.frames)],
        video_metadata=[{"total_num_frames": 5, "fps": 2.0, "frames_indices": [0, 1, 2, 3, 4]}],
        do_sample_frames=False,
        return_tensors="pt",
    )
    length = inputs["input_ids"].shape[1]
    for key in ("input_ids", "attention_mask", "mm_token_type_ids"):
        more = response if key == "input_ids" else torch.full_like(response, int(key == "attention_mask"))
        inputs[key] = torch.cat([inputs[key], more[None]], 1)
    with torch.no_grad():
        logits = policy.module.model(**inputs).logits[0, length - 1 : -1].clone()
    logits[:, list(policy.tokens.suppressed)] = -math.inf
    return logits.log_softmax(-1)[torch.arange(len(response)), response]


OTHERS = [Prompt("words", "Where?"), Prompt("image", "Where?", images=SOURCE[0].videos[0].frames[:1])]


@pytest.mark.parametrize("others", [[], OTHERS], ids=["clips alone", "among others"])
def test_replay_is_what_the_model_itself_says(policy, others):
    mixed = [SOURCE[0], SOURCE[2], *others]
    rollouts = policy.rollout(mixed, 3, range(3 * len(mixed)))
    with torch.no_grad():
        whole = policy.replay(rollouts, policy.module).logp
        parts = [
            policy.replay(rollouts.select(torch.tensor([row])), policy.module).logp for row in range(len(rollouts))
        ]
    for row, part in enumerate(parts):  # a row alone does not share its prompt
        counted = rollouts.mask[row]
        assert torch.allclose(whole[row][counted], part[0][counted[: part.shape[1]]], atol=1e-5)
    for row in range(6):
        sample, tokens = rollouts.samples[row], rollouts.inputs[row]
        expected = alone(policy, sample.prompt, tokens.response)
        assert torch.allclose(whole[row, : len(tokens.response)], expected, atol=1e-5)


def test_the_order_of_frames_is_seen(policy):
    rollouts = policy.rollout([SOURCE[0]], 2, range(2))
    view = ShuffledFrames()
    with torch.no_grad():
        seen = policy.replay(rollouts, policy.module).logp
        shuffled = policy.replay(policy.view(rollouts, view.change), policy.module).logp
    assert not torch.allclose(seen[rollouts.mask], shuffled[rollouts.mask], atol=1e-4)


def test_clips_of_other_lengths_go_through_in_one_batch(policy):
    clip = SOURCE[0].videos[0]
    short = replace(SOURCE[0], id="short", videos=(Video(clip.frames[:2], 2.0),))
    together = policy.tokens.encode([SOURCE[0], short, SOURCE[2]])
    for tokens, prompt in zip(together, [SOURCE[0], short, SOURCE[2]], strict=True):
        (one,) = policy.tokens.encode([prompt])
        assert torch.equal(tokens.prompt, one.prompt)
        assert all(torch.equal(tokens.images[key], value) for key, value in one.images.items())
    assert len(together[1].prompt) < len(together[0].prompt)


def test_places_of_clips_and_images_in_the_text():
    image, clip = Image.new("RGB", (8, 8)), SOURCE[0].videos[0]
    prompt = Prompt("1", "Is <video> after <image> here?", images=(image,), videos=(clip,))
    assert chat(prompt)[-1].parts == ("Is ", clip, " after ", image, " here?")
    assert chat(replace(prompt, text="Well?"))[-1].parts == (image, clip, "Well?")
    with pytest.raises(UserError, match="prompt 1 has 2 <video> markers but 1 videos"):
        chat(replace(prompt, text="<video><video><image>"))
    with pytest.raises(UserError, match="prompt 1 has 0 <image> markers but 1 images"):
        chat(replace(prompt, text="only <video>"))
