"""Settings of the process that user code changes are set back, and its owner is named."""

import logging
import sys

import pytest
import torch

from mmrl.rewards import RewardSet, RewardSpec
from mmrl.rollouts import Prompt, Sample
from mmrl.runtime import user_code
from mmrl.runtime.user_code import settings_restored
from mmrl.sims import build
from tests.sims.line_simulator import Line
from tests.whole_runs.parts import TINY, command, final, spread, start, wait

HERE = "tests.runtime.test_settings_restored"


def changes(sample):
    """A reward that wants doubles and deep recursion for itself, and sets them for all."""
    torch.set_default_dtype(torch.float64)
    sys.setrecursionlimit(50_000)
    return spread(sample)


class Doubles(Line):
    def step(self, rows, chunk):
        torch.set_default_dtype(torch.float64)
        return super().step(rows, chunk)


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.setattr(user_code, "_WARNED", set())
    dtype, limit = torch.get_default_dtype(), sys.getrecursionlimit()
    yield
    now = torch.get_default_dtype(), sys.getrecursionlimit()
    torch.set_default_dtype(dtype)
    sys.setrecursionlimit(limit)
    assert now == (dtype, limit)


def test_each_setting_is_set_back_and_told_of_once(caplog):
    limit = sys.getrecursionlimit()
    with caplog.at_level(logging.WARNING, "mmrl"):
        for _ in range(2):
            with settings_restored("mine"):
                torch.set_default_dtype(torch.bfloat16)
                sys.setrecursionlimit(limit + 7)
            assert (torch.get_default_dtype(), sys.getrecursionlimit()) == (torch.float32, limit)
        with pytest.raises(KeyError), settings_restored("other"):
            torch.set_default_dtype(torch.float64)
            raise KeyError
        assert torch.get_default_dtype() == torch.float32
    end = "for the whole process; it is set back to"
    assert caplog.messages == [
        f"mine set torch's default dtype to torch.bfloat16 {end} torch.float32 after each call",
        f"mine set Python's recursion limit to {limit + 7} {end} {limit} after each call",
        f"other set torch's default dtype to torch.float64 {end} torch.float32 after each call",
    ]


def test_a_reward_is_named(caplog):
    rewards = RewardSet([RewardSpec(name=f"{HERE}:changes", label="own")])
    with caplog.at_level(logging.WARNING, "mmrl"):
        rewards.score([Sample(Prompt("p", "q"), "x"), Sample(Prompt("p", "q"), "y")])
    assert [message.partition(" to ")[0] for message in caplog.messages] == [
        "reward 'own' set torch's default dtype",
        "reward 'own' set Python's recursion limit",
    ]


def test_a_simulator_is_named(caplog):
    with build(f"{HERE}:Doubles", 2) as sim, caplog.at_level(logging.WARNING, "mmrl"):
        sim.reset([0, 1], [sim.simulator.tasks[0]] * 2)
        sim.step(torch.zeros(2, 1, sim.simulator.action_dim).numpy())
    assert [message.partition(" to ")[0] for message in caplog.messages] == [
        f"simulator {HERE}:Doubles set torch's default dtype"
    ]


def test_a_run_learns_the_same(tmp_path):
    """Without it the update fails: its weights and its advantages have other types."""
    for name in (f"{HERE}:changes", "tests.whole_runs.parts:spread"):
        run, log = tmp_path / name.rpartition(":")[2], tmp_path / "log.txt"
        options = [f"task.rewards=[{{name: '{name}'}}]", "steps=2", f"run_dir={run}"]
        assert wait(start(command, "train", str(TINY), *options, log=log), log) == [0]
    assert f"reward '{HERE}:changes' set torch's default dtype to torch.float64" in log.read_text()
    one, other = final(tmp_path / "changes"), final(tmp_path / "spread")
    assert all(torch.equal(value, other[name]) for name, value in one.items())
