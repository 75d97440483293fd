"""Two ways to run five rows of the line simulator."""

import numpy as np


def assert_alike(plain, split):
    """Both play the same episodes, bit for bit."""
    firsts = [sim.reset([0, 50, 90, 3, 300], ["go", "stay", "go", "go", "go"]) for sim in (plain, split)]
    assert np.array_equal(firsts[0].images, firsts[1].images)
    for active in ([1, 1, 1, 1, 1], [0, 1, 1, 0, 1], [1, 1, 1, 1, 1]):
        actions = np.random.default_rng(0).uniform(0, 0.4, (5, 3, 1))
        a, b = (sim.step(actions, np.array(active, bool)) for sim in (plain, split))
        for name in ("reward", "terminated", "truncated", "success", "valid", "dropped"):
            assert np.array_equal(getattr(a, name), getattr(b, name)), name
        assert np.array_equal(a.observation.state, b.observation.state)
        assert np.array_equal(a.observation.images, b.observation.images)
        assert a.observation.instructions == b.observation.instructions
    assert np.array_equal(plain.expert(length=2), split.expert(length=2)) and split.simulator.restarts == 0
