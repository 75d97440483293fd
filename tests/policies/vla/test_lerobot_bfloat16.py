"""LeRobot policies whose weights are bf16: what is computed in fp32, and that they act as LeRobot's code would."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tests.policies.vla.test_lerobot_lora import LORA, PARTS, assert_equal_actions, moved
from tests.policies.vla.test_lerobot_policy import KINDS, LIKELIHOODS, SEEDS, STARTS, lerobot, load


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request, tmp_path_factory):
    from tests.policies.vla import tiny_lerobot

    with tiny_lerobot.written(tmp_path_factory.mktemp("half") / request.param, request.param) as folder:
        yield folder


def halved(checkpoint, **options):
    return load(checkpoint, dtype="bfloat16", **options)


def theirs(folder):
    """The policy and its processors as LeRobot loads them, in fp32."""
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    config = PreTrainedConfig.from_pretrained(folder)
    config.load_vlm_weights = False
    policy = get_policy_class(config.type).from_pretrained(folder, config=config, strict=True)
    return policy, *make_pre_post_processors(policy.config, str(folder))


@lerobot
def test_it_acts_as_lerobots_code_with_transformers_in_bf16_and_the_rest_in_fp32(checkpoint, tmp_path):
    """LeRobot's policy with the same rounded weights, but states, noisy actions, noise levels and velocities through
    layers of fp32, and noise levels too where they modulate norms. Of equal numbers all actions are equal."""
    ours = halved(checkpoint)
    assert {p.dtype for p in ours.module.parameters()} == {torch.bfloat16}
    assert torch.float32 in {b.dtype for b in ours.module.buffers()}  # angles
    ours.save(tmp_path, ours.module.state_dict())
    policy, *processors = theirs(tmp_path)
    before = assert_equal_actions(load(tmp_path), (policy, *processors))  # the rounded weights in fp32
    for name, parameter in policy.named_parameters():
        if "_with_expert." in name and ".dense." not in name:
            parameter.data = parameter.data.bfloat16()
    after = assert_equal_actions(ours, (policy, *processors))
    assert 1e-4 < (after - before).abs().max() < 0.05 * before.std()


@lerobot
@pytest.mark.parametrize("options", [{}, {"freeze": PARTS}, {"lora": LORA}], ids=["whole", "expert", "lora"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_on_policy_ratio_is_exactly_one(checkpoint, likelihood, options):
    policy = halved(checkpoint, likelihood=likelihood, **options)
    moved(policy.module)
    assert {p.dtype for p in policy.module.parameters()} == {torch.bfloat16}
    rollouts = policy.rollout(STARTS, 2, SEEDS)
    with torch.no_grad():
        old = policy.replay(rollouts, policy.module)
    now = policy.replay(replace(rollouts, old_logp=old.logp, old_prediction=old.prediction), policy.module)
    assert now.log_ratio.requires_grad and torch.equal(now.log_ratio, torch.zeros_like(now.log_ratio))
    assert now.logp.dtype == torch.float32 and old.logp[rollouts.mask].std() > 0
    now.logp[rollouts.mask].sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in policy.module.parameters())


@lerobot
def test_likelihoods_are_those_of_fp32_to_rounding(checkpoint):
    whole, half = load(checkpoint, "one step"), halved(checkpoint, likelihood="one step")
    rollouts = whole.rollout(STARTS, 2, SEEDS)
    with torch.no_grad():
        expected, found = (p.replay(rollouts, p.module).logp[rollouts.mask] for p in (whole, half))
    assert not torch.equal(expected, found)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05)


@lerobot
def test_a_noisy_action_is_not_rounded(checkpoint):
    """Two chunks that differ by less than bf16 can tell have velocities that differ."""
    ours = halved(checkpoint)
    backbone, head = ours.module.backbone, ours.module.head
    seen = ours.prepare(ours.sim.reset([0], ["go"]).select([0]))
    x, sigma = torch.ones(1, *head.latent), torch.tensor([0.5])
    with torch.no_grad():
        reading = ours.module.encode(backbone.collate(seen, torch.device("cpu")))
        one, other = (backbone.unwrapped.model.action_in_proj(part) for part in (x, x + 2**-10))
        assert one.dtype == torch.float32 and not torch.equal(one, other)
        assert torch.equal((x + 2**-10).bfloat16(), x.bfloat16())
        assert backbone.velocity(reading, x, sigma).dtype == torch.float32


@lerobot
def test_what_is_saved_is_bf16_and_loads_in_both_libraries(checkpoint, tmp_path):
    policy = halved(checkpoint, lora=LORA)
    moved(policy.module)
    policy.save(tmp_path, policy.module.state_dict())
    adapters = load_file(tmp_path / "adapter_model.safetensors")
    assert adapters and {value.dtype for value in adapters.values()} == {torch.bfloat16}
    again = halved(tmp_path)
    rollouts = policy.rollout(STARTS, 2, SEEDS)
    with torch.no_grad():
        one, other = (p.replay(rollouts, p.module).logp for p in (policy, again))
    assert torch.equal(one, other)
