"""A critic on a masked diffusion model: its values are of the states of the trace, are saved, and train."""

import pytest
import torch

from mmrl.config import validate
from mmrl.errors import UserError
from tests.policies.discrete_diffusion.parts import PROMPT, forget_end, given, policy_of
from tests.whole_runs.parts import distance

PPO = {"type": "ppo", "gamma": 1, "critic": {"width": 8}}
RESPONSE, STEPS = [8, 13, 10], [2, 0, 1]


def made_by(folder, likelihood, algorithm=PPO, **options):
    policy = policy_of(folder, algorithm=algorithm, unmasking={"likelihood": likelihood, "order": "random"}, **options)
    return forget_end(policy)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("critic")


def spoken(policy):
    """The last layer begins at 0: gives the critic something to say."""
    torch.manual_seed(3)
    torch.nn.init.normal_(policy.module.critic.layers[-1].weight)


@pytest.mark.parametrize(
    ("likelihood", "moments"),
    [("trace", STEPS), ({"type": "trace", "shrink": 2}, [1, 0, 0]), ({"type": "step_merge", "segments": 2}, [1, 0, 1])],
)
def test_the_value_is_of_the_state_that_a_place_was_filled_in(folder, likelihood, moments):
    policy = made_by(folder, likelihood)
    batch = given(policy, [RESPONSE], [STEPS])
    spoken(policy)
    told = policy.replay(batch, policy.module)
    assert told.extras["moment"].tolist() == [moments]
    prompt = policy.layout.encode(PROMPT)
    for place, moment in enumerate(moments):
        written = [i if m < moment else policy.layout.vocabulary.mask for i, m in zip(RESPONSE, moments, strict=True)]
        with torch.no_grad():
            ids = torch.cat([prompt, torch.tensor(written)])[None]
            hidden = policy.module.model(input_ids=ids, output_hidden_states=True).hidden_states[-1]
            expected = policy.module.critic.layers(hidden[0, len(prompt) + place])[0]
        torch.testing.assert_close(told.value[0, place].detach(), expected, atol=1e-5, rtol=0)
    plain = made_by(folder, likelihood, algorithm="grpo")
    without = plain.replay(batch, plain.module)
    assert without.value is None and "moment" not in without.extras  # who needs no critic, has none
    torch.testing.assert_close(told.logp, without.logp, atol=0, rtol=0)


def test_one_pass_asks_the_mask_tokens_beside_the_response(folder):
    policy = made_by(folder, "any_order")
    spoken(policy)
    told = policy.replay(given(policy, [RESPONSE] * 2, [STEPS, [0, 0, 1]]), policy.module)
    assert told.extras["moment"].tolist() == [STEPS, [0, 0, 1]]
    same = policy.replay(given(policy, [[9, 13, 11]], [STEPS]), policy.module)
    torch.testing.assert_close(same.value[0, 1:], told.value[0, 1:])  # the first place to be filled saw nothing
    assert abs(same.value[0, 0] - told.value[0, 0]) > 1e-4


@pytest.mark.parametrize("detach", [False, True])
def test_the_model_learns_from_its_loss_unless_it_is_detached(folder, detach):
    policy = made_by(folder, "trace", algorithm=PPO | {"critic": {"width": 8, "detach": detach}})
    batch = given(policy, [RESPONSE], [STEPS])
    fresh = made_by(folder, "trace", perturbed=0)
    assert not fresh.replay(batch, fresh.module).value.any()  # it begins at 0
    spoken(policy)
    policy.replay(batch, policy.module).value.sum().backward()
    moved = [p.grad is not None and bool(p.grad.any()) for p in policy.module.model.parameters()]
    assert any(moved) is not detach
    assert all(p.grad.any() for p in policy.module.critic.parameters())


def test_padding_changes_no_value(folder):
    policy = made_by(folder, "trace")
    spoken(policy)
    long = type(PROMPT)("long", "99+99=", answer="198")
    batch = policy.rollout([PROMPT, long], 1, [1, 2])
    with torch.no_grad():
        whole = policy.replay(batch, policy.module).value
        alone = policy.replay(batch.select(torch.tensor([0])), policy.module).value
    torch.testing.assert_close(whole[:1], alone, rtol=0, atol=1e-5)


def test_it_is_saved_and_found_again(folder, tmp_path):
    policy = made_by(folder, "trace")
    spoken(policy)
    policy.save(tmp_path / "saved", policy.module.state_dict())
    again = policy_of(tmp_path / "saved", build=False, perturbed=0, algorithm=PPO, unmasking={"likelihood": "trace"})
    assert distance(policy.module.state_dict(), again.module.state_dict()) == 0
    policy_of(tmp_path / "saved", build=False)  # who needs no critic, reads none
    wide = PPO | {"critic": {"width": 16}}
    with pytest.raises(
        UserError, match=r"critic.safetensors: the shape of layers.0.bias is \[\d+\], but \[16\] in algorithm.critic"
    ):
        policy_of(tmp_path / "saved", build=False, algorithm=wide, unmasking={"likelihood": "trace"})


def test_what_it_can_not_be(tmp_path):
    """Before any model is looked for."""
    missing = tmp_path / "nothing"
    with pytest.raises(UserError, match=r"unmasking.likelihood=elbo scores .* never had, but algorithm.critic needs"):
        policy_of(missing, build=False, algorithm=PPO, unmasking={"likelihood": "elbo"})
    separate = PPO | {"critic": {"type": "separate"}}
    with pytest.raises(UserError, match="algorithm.critic.type=separate does not work with a masked diffusion model"):
        policy_of(missing, build=False, algorithm=separate, unmasking={"likelihood": "trace"})
    tree = {"run_dir": "x", "model": {"type": "uniform_diffusion"}, "task": {"type": "text_sums"}, "algorithm": PPO}
    with pytest.raises(UserError, match="algorithm.type=ppo needs a critic, which model.type=uniform_diffusion"):
        validate(tree, "test")
