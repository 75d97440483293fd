"""Rewards with `python`: the same values as in this process, and faults that cost samples, through a real process."""

import math
import os
import sys

import pytest
import torch

from mmrl.errors import UserError
from mmrl.rewards import RewardSet, RewardSpec
from mmrl.rollouts import Prompt, Sample

REWARDS = '''
import os, time
from mmrl.errors import UserError
from mmrl.rollouts import Spans

print("imported", flush=True)


class Fragile:
    """The length of the response times `factor`, or what the response says."""

    scope = "sample"

    def __init__(self, factor=1.0):
        if factor < 0:
            raise ValueError(f"factor must not be negative, not {factor}")
        self.factor, self.calls = factor, 0

    def score(self, samples):
        self.calls += 1
        return [self.one(sample) for sample in samples]

    def one(self, sample):
        words = sample.response
        if words == "raise":
            raise RuntimeError("no")
        if words == "exit":
            os._exit(3)
        if words == "sleep":
            time.sleep(60)
        if words == "refuse":
            raise UserError("prompt p cannot be scored")
        if words == "calls":
            return self.calls
        if words == "process":
            return os.getpid()
        if words == "image":
            return sample.image.mean().item() + sample.prompt.images[0].size[0]
        return len(words) * self.factor


class Ranks:
    scope = "group"

    def score(self, samples):
        lengths = sorted(len(sample.response) for sample in samples)
        return [lengths.index(len(sample.response)) for sample in samples]


def halves(sample, value=1.0):
    middle = len(sample.response) // 2
    return Spans([(0, middle, value), (middle, len(sample.response), -3 * value)])


def missing(sample):
    import not_installed_anywhere


def trl_style(completions, answer, **columns):
    return [float(text[0]["content"] == right) for text, right in zip(completions, answer)]
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("interpreter")
    (path / "frail.py").write_text(REWARDS)
    return path


@pytest.fixture(autouse=True)
def there(folder, monkeypatch):
    monkeypatch.chdir(folder)  # a custom reward is imported from the current folder


def rewards(name="frail:Fragile", **settings):
    return RewardSet([RewardSpec(name=name, label="reward", python=sys.executable, **settings)])


def says(*responses):
    return [Sample(Prompt(f"p{i}", "?"), response=text) for i, text in enumerate(responses)]


def test_values_faults_and_a_process_that_stays(caplog):
    """One process after the other: what raises costs its sample, what ends the process costs its batch."""
    scored = rewards(options={"factor": 0.5})
    first = scored.score(says("a", "", "abcd", "process"))
    assert first[:3, 0].tolist() == [0.5, 0.0, 2.0] and first[3, 0] != os.getpid()
    values = scored.score(says("ab", "raise", "abc"))[:, 0]
    assert values[[0, 2]].tolist() == [1.0, 1.5] and values[1].isnan()
    assert scored.components[0].failures.causes == {"error": 1}
    assert "RuntimeError: no" in scored.reasons["reward"]
    assert scored.score(says("process"))[0, 0] == first[3, 0]  # it has not ended
    assert scored.score(says("ab", "exit")).isnan().all()
    assert scored.components[0].failures.causes == {"error": 1, "crash": 2}
    assert "its process ended with 3" in caplog.text
    after = scored.score(says("ab", "process", "calls"))[:, 0].tolist()
    assert after[0] == 1.0 and after[1] != first[3, 0] and after[2] == 1  # the new one's first call
    with pytest.raises(UserError, match="reward 'reward': prompt p cannot be scored"):
        scored.score(says("refuse"))
    scored.components[0].reward.close()


def test_a_deadline_costs_the_batch():
    scored = rewards(deadline_s=1.0, on_timeout="lowest")
    assert scored.score(says("ab", "sleep"))[:, 0].tolist() == [0.0, 0.0]
    assert scored.components[0].failures.causes == {"deadline": 2}
    scored = rewards(deadline_s=30.0, batch_size=1)
    drawn = Sample(Prompt("p", "?", images=(image(),)), response="image", image=torch.full((3, 2, 2), 0.25))
    assert scored.score([drawn, *says("calls")])[:, 0].tolist() == [7.25, 2.0]


def image():
    from PIL import Image

    return Image.new("RGB", (7, 2))


def test_groups_functions_spans_and_other_libraries():
    group = torch.tensor([0, 1, 0, 0, 1])
    ranks = rewards("frail:Ranks").score(says("aaa", "a", "b", "cc", "bb"), group)[:, 0]
    assert ranks.tolist() == [2, 0, 0, 1, 1]
    samples = says("abcd")
    assert rewards("frail:halves", options={"value": 2.0}, total="min").score(samples).item() == -6.0
    assert samples[0].spans["reward"].values == ((0, 2, 2.0), (2, 4, -6.0))
    right = [Sample(Prompt("p", "?", answer=text), response="7") for text in ("7", "8")]
    assert rewards("frail:trl_style", signature="trl").score(right)[:, 0].tolist() == [1.0, 0.0]


def test_a_reward_of_mmrl_gives_what_it_gives_here():
    samples = [Sample(Prompt("p", "?", answer="12 m"), response=text) for text in ("1200 cm", "12", "13 m")]
    here = RewardSet([RewardSpec(name="numeric")]).score(samples)
    assert torch.equal(rewards("numeric").score(samples), here) and here[:, 0].tolist() == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("frail:Fragile", {"options": {"factor": -1.0}}, "factor must not be negative, not -1.0"),
        ("frail:Fragile", {"options": {"fctor": 1.0}}, "has no option 'fctor' .did you mean 'factor'"),
        ("frail:Nobody", {}, "no function 'frail:Nobody'"),
        ("frail:Fragile", {"workers": 2}, "leave out isolated, workers and limits"),
        ("frail:Fragile", {"isolated": True}, "leave out isolated, workers and limits"),
        ("frail:Ranks", {"batch_size": 2}, "does not accept batch_size"),
    ],
)
def test_what_cannot_be_built_is_refused_at_once(name, settings, words):
    with pytest.raises(ValueError, match=f"^reward '{name}'.*{words}"):
        rewards(name, **settings)


def test_an_interpreter_without_mmrl_or_none_at_all(tmp_path):
    with pytest.raises(ValueError, match="there is no interpreter python=/nowhere/python; set python to"):
        RewardSet([RewardSpec(name="numeric", python="/nowhere/python")])
    useless = tmp_path / "python"
    useless.write_text("#!/bin/sh\nexit 1\n")
    useless.chmod(0o755)
    with pytest.raises(ValueError, match="does not run mmrl: its process ended with 1; it needs mmrl, torch"):
        RewardSet([RewardSpec(name="numeric", python=str(useless))])


def test_deqa_needs_an_interpreter_of_its_own():
    with pytest.raises(ValueError, match="needs python: the interpreter of an environment.*rewards install deqa"):
        RewardSet([RewardSpec(name="deqa")])


def test_an_image_that_is_not_finite_has_no_quality(tmp_path):
    """The model's code comes from its folder: its scores, one for each image, are the reward's."""
    (tmp_path / "quality.py").write_text(
        "import numpy, torch\n"
        "from transformers import PretrainedConfig, PreTrainedModel\n\n\n"
        "class QualityConfig(PretrainedConfig):\n    model_type = 'quality'\n\n\n"
        "class Quality(PreTrainedModel):\n"
        "    config_class = QualityConfig\n\n"
        "    def __init__(self, config):\n"
        "        super().__init__(config)\n"
        "        self.scale = torch.nn.Parameter(torch.ones(()))\n"
        "        self.post_init()\n\n"
        "    def score(self, images):\n"
        "        means = torch.tensor([numpy.asarray(image).mean() / 255 for image in images])\n"
        "        return 1 + means * self.scale\n"
    )
    (tmp_path / "config.json").write_text(
        '{"model_type": "quality", "auto_map": '
        '{"AutoConfig": "quality.QualityConfig", "AutoModelForCausalLM": "quality.Quality"}}'
    )
    from safetensors.torch import save_file

    save_file({"scale": torch.tensor(4.0)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    options = {"model": str(tmp_path), "dtype": "float32", "device": "cpu"}
    scored = rewards("deqa", options=options)
    levels = [0.0, 0.2, 1.0, math.nan, 0.6, 0.4, 0.8, 0.2, 0.0, 1.0, 0.6]  # more than one batch of the model
    samples = [Sample(Prompt("p", "?"), image=torch.full((3, 4, 4), level)) for level in levels]
    values = scored.score(samples)[:, 0]
    torch.testing.assert_close(values, torch.tensor([1 + 4 * level for level in levels]), equal_nan=True)
    with pytest.raises(ValueError, match="^reward 'deqa': model '/nowhere'"):
        rewards("deqa", options={"model": "/nowhere"})
