import re
from pathlib import Path

import pytest
import torch

import mmrl.tasks.image_generation as image_generation
from mmrl.rollouts import Prompt, Sample
from mmrl.tasks.image_generation.task import words
from tests.tasks.choosing import build


def shown(prompts, target=None):
    return [Sample(p, image=p.metadata["target"] if target is None else target) for p in prompts]


class Mean:
    """A reward of the user's own: the mean of the image."""

    scope = "sample"

    def score(self, samples):
        return [sample.image.mean().item() for sample in samples]


class ShareOfGroup:
    """Another, which compares the images of a group."""

    scope = "group"

    def score(self, samples):
        return [sample.image.sum().item() / sum(s.image.sum().item() for s in samples) for sample in samples]


MEAN, SHARE = f"{__name__}:Mean", f"{__name__}:ShareOfGroup"


@pytest.mark.parametrize("kind, channels, least", [("digits", 1, 0.96), ("shapes", 3, 1.0)])
def test_defaults(kind, channels, least):
    task = build("image_generation", {"data": {"type": kind, "eval_size": 200}}, seed=3)
    assert (len(task.train), len(task.evaluation)) == (20_000, 200)
    assert task.train[0].id == f"{kind}-train-3-0"
    assert task.evaluation[0].id == f"{kind}-heldout-0-0"  # every run is judged on the same prompts
    prompts = list(task.evaluation)
    samples = shown(prompts) + shown(prompts, torch.zeros_like(prompts[0].metadata["target"]))
    assert samples[0].image.shape[0] == channels
    scores, accuracy = task.score(samples), task.accuracy(samples)
    assert scores.shape == (400, 1) and len(task.reward_names) == len(task.reward_weights) == 1
    assert scores[:200].mean() > scores[200:].mean() + 0.5
    assert accuracy[:200].mean() >= least and accuracy[200:].mean() < 0.15
    assert {word for prompt in prompts for word in prompt.text.split()} <= set(words(kind))
    reverse = torch.arange(400).flip(0)
    again = task.score([samples[i] for i in reverse])
    torch.testing.assert_close(again, scores[reverse])


def test_the_vocabulary_of_a_users_prompts_is_not_known():
    with pytest.raises(ValueError, match="only the prompts of digits and shapes .* not of 'prompts'"):
        words("prompts")


@pytest.mark.parametrize("kind", ["digits", "shapes"])
def test_guards(kind):
    task = build("image_generation", {"data": {"type": kind}}, seed=0)
    prompt = task.train[0]
    target = prompt.metadata["target"]
    samples = shown([prompt] * 3, target) + shown([prompt], target * 2 - 0.5)
    measures = task.measures(samples, torch.tensor([0, 0, 1, 1]))
    assert set(measures) == {f"guard/{n}" for n in ("out_of_gamut", "sharpness", "diversity", "second_scorer")}
    assert all(values.shape == (4,) and values.dtype == torch.float32 for values in measures.values())
    outside = ((target * 2 - 0.5 < 0) | (target * 2 - 0.5 > 1)).float().mean()
    torch.testing.assert_close(measures["guard/out_of_gamut"], torch.tensor([0, 0, 0, outside]))
    torch.testing.assert_close(measures["guard/diversity"][:2], torch.zeros(2))
    assert task.measures(samples)["guard/diversity"].isfinite().all()  # without groups, equal prompts are one
    own = build("image_generation", {"data": {"type": kind}, "second_scorer": {"name": MEAN}}, seed=0)
    brightness = torch.stack([sample.image.mean() for sample in samples])
    torch.testing.assert_close(own.measures(samples)["guard/second_scorer"], brightness)


def test_prompts_with_rewards_of_the_users_own(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"image {n}\n" for n in range(40)))
    rewards = [{"name": MEAN, "weight": 0.5, "label": "mean"}, {"name": SHARE, "label": "share"}]
    options = {"data": {"type": "prompts", "train": str(path), "heldout": 0.3}, "rewards": rewards}
    task = build("image_generation", options | {"accuracy": {"name": MEAN}}, seed=0)
    assert len(task.train) + len(task.evaluation) == 40
    assert (task.reward_names, task.reward_weights) == (("mean", "share"), (0.5, 1.0))
    bright = [Sample(task.train[row], image=torch.full((3, 4, 4), value)) for row, value in enumerate((0.2, 0.6, 0.8))]
    expected = torch.tensor([[0.2, 0.25], [0.6, 0.75], [0.8, 1.0]])
    torch.testing.assert_close(task.score(bright, torch.tensor([7, 7, 2])), expected)
    torch.testing.assert_close(task.accuracy(bright), expected[:, 0])
    assert set(task.measures(bright)) == {"guard/out_of_gamut", "guard/sharpness", "guard/diversity"}
    only = {"data": {"type": "prompts", "eval": str(path)}, "rewards": rewards, "accuracy": {"name": MEAN}}
    assert build("image_generation", only, seed=0).train is None


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dat": {}}, r"unknown key task\.dat; did you mean task\.data\?"),
        ({"data": {"type": "shapes", "colors": ["red"]}}, r"task\.data\.colors; did you mean task\.data\.colours"),
        (
            {"data": {"type": "shape"}},
            r"task\.data\.type=shape is unknown .did you mean shapes.*; .* digits, shapes, edits, named, prompts,",
        ),
        ({"data": {"type": "shapes", "colours": ["pink"]}}, r"data\.colours\.0: Input should be 'red'"),
        ({"data": {"type": "shapes", "scenes": []}}, r"^task\.data\.scenes: "),
        ({"data": {"type": "shapes", "max_count": 5}}, r"^task\.data\.max_count: "),
        ({"data": {"type": "shapes", "colours": ["red"]}}, "no train scene of kind 'relation'"),
        ({"data": {"type": "digits", "careless": 2}}, r"^task\.data\.careless: "),
        ({"data": {"type": "prompts", "train": "a.txt"}}, "data: set either eval, .* or heldout"),
        (
            {"data": {"type": "prompts", "train": "a.txt", "eval": "b.txt", "heldout": 0.1}},
            "eval=b.txt and heldout=0.1 are both set, here or in a file that is extended; set one of them to null",
        ),
        ({"data": {"type": "prompts", "heldout": 0.1}}, "data: heldout is a share of train; set train"),
        ({"data": {"type": "prompts", "eval": "a.txt"}}, "rewards: at least one is needed"),
        ({"data": {"type": "prompts", "eval": "a.txt"}, "rewards": [{"name": MEAN}]}, "accuracy: name the reward"),
        (
            {"rewards": [{"name": MEAN, "wieght": 1}]},
            r"task\.rewards\.0\.wieght; did you mean .*\.weight",
        ),
        ({"rewards": [{"name": "clasifier_logp"}]}, "unknown reward 'clasifier_logp' .did you mean 'classifier_logp'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        build("image_generation", options, seed=0)
    assert "\n" not in str(caught.value)


def test_a_rollout_without_an_image_is_refused():
    task = build("image_generation", {}, seed=0)
    with pytest.raises(Exception, match="'p' has no image"):
        task.score([Sample(Prompt(id="p", text="a handwritten seven", answer=7), response="seven")])


def test_images_of_several_sizes_are_refused():
    task = build("image_generation", {}, seed=0)
    samples = shown([task.train[0]]) + shown([task.train[1]], torch.zeros(1, 9, 8))
    with pytest.raises(Exception, match=re.escape("has the shape [1, 9, 8], expected [1, 8, 8]")):
        task.measures(samples)


def test_task_imports_no_room_above_it():
    for path in Path(image_generation.__file__).parent.glob("*.py"):
        assert not re.search(r"mmrl\.(trainer|cli|config)\b", path.read_text()), path
