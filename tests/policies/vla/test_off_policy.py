"""Stored chunks of actions as vectors for a Q function."""

from types import SimpleNamespace

import numpy as np

from mmrl.policies.vla.off_policy import OffPolicyAccess
from tests.joints.parts import close


def test_actions_that_were_not_executed_are_0_after_the_normalisation():
    """Two of three actions were executed; 0 in the robot's units would be -2.5 in the policy's."""
    normalizer = SimpleNamespace(from_robot=lambda actions: (actions - 5) / 2)
    sim = SimpleNamespace(simulator=SimpleNamespace(action_dim=2))
    policy = SimpleNamespace(action=SimpleNamespace(chunk=3), sim=sim, normalizer=normalizer)
    chunks = [np.array([[7, 9], [5, 3]], np.float32), np.array([[1, 5]], np.float32)]
    close(
        OffPolicyAccess(policy).encode_chunks(chunks),
        [[1, 2, 0, -1, 0, 0, 1, 1, 0], [-2, 0, 0, 0, 0, 0, 1, 0, 0]],
    )
