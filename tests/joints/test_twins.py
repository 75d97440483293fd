"""Groups over two prompts that differ in one word (FocusDiff): who answers what, and who is compared with whom."""

import pytest
import torch

from mmrl.config import validate
from mmrl.errors import UserError
from mmrl.rewards import RewardSet
from mmrl.rewards.settings import RewardSpec
from mmrl.rewards.twins import twin_of
from mmrl.rollouts import Prompt, Sample
from mmrl.tasks.image_generation.data import digits
from tests.joints.parts import Prompts, Table, close


def asked(given, *overrides, twins=("left", "right"), group=(0, 0, 1, 1, 2, 2, 3, 3)):
    """What the policy was asked for, and the rollouts of a step of two prompts with four rollouts each."""
    made = given(
        Table([[-1.0]] * 8, group=list(group), rewards=[0.0, 1.0, 1.0, 2.0, 5.0, 5.0, 5.0, 9.0]),
        "rollout.prompts=2",
        "rollout.group_size=4",
        "algorithm.scale=none",
        *overrides,
    )
    made.trainer.collector.draws.source = Prompts(8, [{"twin": text} for text in twins])
    seen, rollout = [], made.trainer.policy.rollout

    def spy(prompts, group_size, seeds, *, step):
        seen.append(([p.text for p in prompts], [p.id for p in prompts], group_size))
        return rollout(prompts, group_size, seeds, step=step)

    made.trainer.policy.rollout = spy
    return made, made.next(), seen


@pytest.mark.parametrize("at_once", ["null", "4"])
def test_half_of_a_group_answers_the_twin(given, at_once):
    made, batch, seen = asked(given, "rollout.twins=true", f"rollout.micro_batch={at_once}")
    sizes = {call[2] for call in seen}
    texts, ids = ([one for call in seen for one in call[i]] for i in (0, 1))
    assert sizes == {2} and texts[::2] == ["Which?", "Which?"] and set(texts[1::2]) <= {"left", "right"}
    assert ids[1::2] == [f"{i}-twin" for i in ids[::2]]
    assert batch.group.tolist() == [0] * 4 + [1] * 4
    assert [s.prompt.text for s in batch.samples][2:4] == [texts[1]] * 2
    close(made.prepare(batch).advantages, [[-1], [0], [0], [1], [-1], [-1], [-1], [3]])  # means 1 and 6


def test_without_it_a_group_answers_one_prompt(given):
    _, batch, seen = asked(given, group=(0, 0, 0, 0, 1, 1, 1, 1))
    assert seen[0][2] == 4 and {s.prompt.text for s in batch.samples} == {"Which?"}


def test_a_twin_of_a_twin_is_the_prompt():
    text = Prompt("a", "a red cup", answer=1, metadata={"twin": "a blue cup", "kind": "k"})
    other = twin_of(text)
    assert (other.id, other.text, other.metadata["kind"]) == ("a-twin", "a blue cup", "k")
    assert twin_of(other).text == "a red cup" and twin_of(other).id == "a"


def test_digits_have_twins_of_one_other_word():
    plain, source = digits.DigitPromptSource(size=60, seed=0), digits.DigitPromptSource(size=60, seed=0, twins=True)
    for i in range(60):
        one, other = source[i].text.split(), twin_of(source[i])
        assert source[i].text == plain[i].text and other.answer != source[i].answer
        assert sum(a != b for a, b in zip(one, other.text.split(), strict=True)) == 1
        assert other.text in digits.texts("train", other.answer)


def letters(sample):
    return None if sample.prompt.text == "none" else float(len(sample.prompt.text) * len(sample.response))


def test_a_margin_is_own_less_other():
    spec = RewardSpec(name="twin_margin", options={"reward": "tests.joints.test_twins:letters"})
    prompts = [Prompt("a", "abc", metadata={"twin": "a"}), Prompt("b", "abc", metadata={"twin": "none"})]
    found = RewardSet([spec]).score([Sample(prompt, response="xx") for prompt in prompts], torch.tensor([0, 1]))
    assert found[0, 0] == 4.0 and found[1, 0].isnan()  # 3 x 2 - 1 x 2
    with pytest.raises(ValueError, match="which compares samples with one another"):
        RewardSet([RewardSpec(name="twin_margin", options={"reward": "majority"})])
    with pytest.raises(UserError, match=r"prompt c has no twin: .*metadata\['twin'\]"):
        RewardSet([spec]).score([Sample(Prompt("c", "abc"))], torch.tensor([0]))


def test_an_odd_group_is_refused():
    tree = {"run_dir": "unset", "rollout": {"group_size": 3, "twins": True}}
    with pytest.raises(UserError, match="group_size=3 is odd, and each twin gets half of a group; make it even"):
        validate(tree, "test")
