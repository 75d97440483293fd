"""What a user's own program brings: rewards with a state, rewards that are objects, a stop, numbers that change."""

import pytest
import torch

from mmrl import Job, configure, read_run
from mmrl.checkpoints.store import shared_rewards
from mmrl.checkpoints.training import resume_obstacle
from mmrl.errors import UserError
from mmrl.job import record_end
from mmrl.rewards import RewardSet, RewardSpec
from mmrl.rollouts import Prompt, Sample
from tests.whole_runs.parts import distance, final, make, metrics, release, timeless, train

HERE = "tests.company.test_own_parts"
alone = pytest.mark.usefixtures("alone")


class Count:
    """A reward that counts its calls and pays by them, and by the length of the prompt's answer's first letter."""

    scope = "sample"

    def __init__(self, remembers=True):
        self.calls, self.remembers = torch.zeros(()), remembers

    def score(self, samples):
        self.calls += 1
        return [float(self.calls) * 0.01 * (i % 3) for i, _ in enumerate(samples)]

    def state(self):
        return {"calls": self.calls} if self.remembers else {}

    def load(self, state):
        if self.remembers:
            self.calls = state["calls"]


class Unsaveable(Count):
    def state(self):
        return {"calls": [1, object()]}


def letters(sample):
    return float(len(sample.response))


def parts(folder, *options):
    train(folder, *options, "steps=2", "checkpoint.every=2")
    train(folder, *options, "checkpoint.every=2", resume=True)
    return rows(folder)


def rows(folder):
    return [row for row in timeless(metrics(folder)) if "loss" in row]


@alone
def test_a_reward_goes_on_with_its_state(tmp_path):
    counting = [f"task.rewards=[{{name: '{HERE}:Count'}}]"]
    train(tmp_path / "whole", *counting)
    whole = rows(tmp_path / "whole")
    assert [row[f"reward/{HERE}:Count"] for row in whole] == sorted({row[f"reward/{HERE}:Count"] for row in whole})
    assert parts(tmp_path / "parts", *counting) == whole
    assert distance(final(tmp_path / "whole"), final(tmp_path / "parts")) == 0
    forgetful = [f"task.rewards=[{{name: '{HERE}:Count', options: {{remembers: false}}}}]"]
    assert parts(tmp_path / "forgetful", *forgetful) != whole  # the control: without a state it begins anew


@alone
def test_a_state_that_no_checkpoint_holds_is_named_at_the_start(tmp_path):
    with pytest.raises(UserError, match=r"Unsaveable': its state\['calls'\]\[1\] is object; a checkpoint holds"):
        make(tmp_path, f"task.rewards=[{{name: '{HERE}:Unsaveable'}}]")


def test_states_by_rank():
    class Ranks:
        rank, world = 1, 2

    assert shared_rewards([{"a": 1}, {"a": 2}], Ranks, None) == {"a": 2}
    assert shared_rewards([{}, {}, {}], Ranks, None) == {}
    with pytest.raises(UserError, match="reward 'a' has a state for each rank, and run was written by 3 ranks, not 2"):
        shared_rewards([{"a": 1}] * 3, Ranks, "run")
    with pytest.raises(UserError, match="a state of reward 'exact_match', which now has no method load"):
        RewardSet([RewardSpec(name="exact_match")]).load({"exact_match": {}})


# --- rewards as objects ---


def test_a_function_stands_for_its_name():
    tree = {"run_dir": "x", "task": {"rewards": [{"name": letters}, {"name": Count, "weight": 2.0}]}}
    names = [spec.name for spec in configure(tree).task.rewards]
    assert names == [f"{HERE}:letters", f"{HERE}:Count"]
    for wrong, message in (
        (lambda sample: 1.0, "not at the top level of its module"),
        (Count(), "a Count cannot be a reward's name"),
    ):
        with pytest.raises(UserError, match=message):
            configure({"run_dir": "x", "task": {"rewards": [{"name": wrong}]}})


def test_another_reward_takes_the_place_of_one():
    rewards = RewardSet([RewardSpec(name="exact_match"), RewardSpec(name=f"{HERE}:letters")])
    samples = [Sample(Prompt("p", "q", answer="7"), "7"), Sample(Prompt("p", "q", answer="7"), "seven")]
    assert rewards.score(samples).tolist() == [[1.0, 1.0], [0.0, 5.0]]
    scale = 3.0
    rewards.replace(f"{HERE}:letters", lambda sample: scale * len(sample.response))
    assert rewards.score(samples).tolist() == [[1.0, 3.0], [0.0, 15.0]]
    rewards.replace("exact_match", Count())
    assert rewards.score(samples)[:, 0].tolist() == pytest.approx([0.0, 0.01])
    with pytest.raises(UserError, match="there is no reward 'letters'; there are exact_match"):
        rewards.replace("letters", letters)
    isolated = RewardSet([RewardSpec(name="math")])
    with pytest.raises(UserError, match="'math' is isolated"):
        isolated.replace("math", letters)


# --- a stop, and numbers that change ---


@alone
def test_a_run_that_was_asked_to_end_has_saved(tmp_path):
    trainer = make(tmp_path, "steps=4", "checkpoint.every=0")
    trainer.run.on_step = lambda step, metrics: setattr(trainer, "stop_requested", step == 2)
    with record_end(trainer.run, trainer):
        trainer.train()
    release(trainer)
    ending = read_run(tmp_path).ending
    assert ending.state == "stopped" and ending.sentence.startswith(
        "The program stopped it at step 2 of 4; it has saved"
    )
    with pytest.raises(UserError, match="for a job that trains"):
        Job(configure({"run_dir": "x"})).stop()
    assert trainer.step == 2 and trainer.stop_signal == 0 and not (tmp_path / "final").exists()
    assert (tmp_path / "checkpoints/step-000002").is_dir()
    again = train(tmp_path, "steps=4", resume=True)
    assert again.step == 4 and [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


@alone
def test_a_number_that_is_named_may_change_within_a_run(tmp_path):
    changed = ["steps=4", "algorithm.surrogate.high=0.3", "rollout.temperature=0.5"]
    train(tmp_path / "a", "steps=2", "checkpoint.every=2")
    with pytest.raises(
        UserError, match=r"surrogate.high is 0.3 .* to its former value, name it in checkpoint.may_change, or"
    ):
        train(tmp_path / "a", *changed, resume=True)
    named = "checkpoint.may_change=[algorithm.surrogate.high, rollout.temperature]"
    trainer = make(tmp_path / "a", *changed, named, "checkpoint.every=2")
    said = []
    trainer.run.line = said.append
    trainer.saver.say = said.append
    trainer.resume()
    assert trainer.step == 2 and trainer.config.rollout.temperature.number == 0.5
    assert said.count("algorithm.surrogate.high changes from 0.28 to 0.3") == 1
    assert said.count("rollout.temperature changes from 1.0 to 0.5") == 1
    trainer.train()
    release(trainer)
    train(tmp_path / "a", "steps=5", *changed[1:], resume=True)  # the checkpoint knows them now


@pytest.mark.parametrize(
    ("key", "before", "after", "reason"),
    [
        ("algorithm.cap", None, 9.0, None),
        ("optim.betas", [0.9, 0.99], [0.8, 0.99], None),
        ("algorithm.terms", [{"type": "kl", "coefficient": 0.1}], [{"type": "kl", "coefficient": 0.2}], None),
        ("algorithm.terms", [{"type": "kl"}], [{"type": "entropy"}], "only numbers in"),
        ("algorithm.terms", [{"type": "kl"}], [], "only numbers in"),
        ("algorithm.terms", [{"type": "kl"}], [{"type": "kl", "gap": 1}], "only numbers in"),
        ("algorithm.clip", True, False, "only numbers in"),
        ("algorithm.clip", True, 1, "only numbers in"),
        ("rollout.group_size", 4, 8, "cannot change"),
        ("optim.ema", None, 0.9, "cannot change"),
        ("model.lora.rank", 4, 8, "cannot change"),
        ("seed", 0, 1, "cannot change"),
    ],
)
def test_what_may_be_named(key, before, after, reason):
    fixed = resume_obstacle(key, before, after)
    assert fixed is None if reason is None else reason in fixed
