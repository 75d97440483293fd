"""Operations of episodes: of replay beside torch's own counter, and of play."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.engine.test_flops import plain_attention
from tests.policies.vla.conftest import starts


@pytest.mark.parametrize("kind", ["parallel", "flow"])
def test_replay_is_within_one_per_cent_and_play_is_counted(make, kind, monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", plain_attention)
    policy = make(kind, "small")
    rollouts = policy.rollout(starts(0, 30), 1, [11, 12])
    played = policy.work.flops
    learns = kind == "flow"  # a backbone's last layer is computed for tokens that are not read: it counts as learning

    def replay(these):
        with torch.set_grad_enabled(learns):
            logp = policy.replay(these, policy.module).logp
        if learns:
            logp.sum().backward()

    replay(rollouts.select(torch.tensor([0])))
    before = policy.work.flops
    assert played > 0 and before > played
    with FlopCounterMode(display=False) as counter:
        replay(rollouts)
    assert policy.work.flops - before == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert policy.work.units(rollouts) == {"policy_steps": sum(map(len, rollouts.inputs)), "episodes": 2}
