"""Policy steps of earlier episodes: what is stored, drawn, kept for checkpoints, and learned from."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from mmrl.collection.extra_sources import SourceContext
from mmrl.collection.stored_steps.ring import StepRing
from mmrl.collection.stored_steps.source import StoredSteps
from mmrl.config import load
from mmrl.errors import UserError
from mmrl.protocols.trajectory import RewardsToGo, Trajectory
from mmrl.rollouts import FRESH, REPLAYED
from mmrl.training.metrics import Metrics
from tests.whole_runs.parts import ROBOTS, TINY, distance, final, make, metrics, release, timeless, train

pytestmark = pytest.mark.usefixtures("alone")


def episode(first, length, *, success=True, executed=2):
    """An episode whose numbers say where they stand: image and state of step t are first + t, its action is 10 times
    that, its reward a tenth. Of the last chunk `executed` actions count."""
    count = np.arange(first, first + length + 1)
    valid = np.ones((length, 2), bool)
    valid[-1, executed:] = False
    return Trajectory(
        instruction=f"from {first}",
        cameras=("left", "right"),
        images=np.broadcast_to(count[:, None, None, None], (length + 1, 2, 4, 3)).astype(np.uint8),
        state=count[:, None].astype(np.float32),
        actions=np.stack([10.0 * count[:-1], 10.0 * count[:-1] + 1], 1)[..., None].astype(np.float32),
        valid=valid,
        rewards=count[:-1].astype(np.float32) / 10,
        terminated=success,
        success=success,
    )


def line_episode(length):
    """One that the line could show: images of 2 x 2, one camera, actions of one number between -1 and 1."""
    shown = episode(0, length)
    return replace(shown, cameras=("camera",), images=shown.images[:, :, :2], actions=shown.actions / 1000)


def ring(folder, *, size=100, chosen="all", checkpoints=2):
    return StepRing(folder, size=size, chosen=chosen, checkpoints=checkpoints)


def names(folder):
    return sorted(path.stem for path in folder.glob("*.safetensors"))


def states(stored):
    """The state of every step that may be drawn, oldest first."""
    return [float(step.observation.state[0, 0]) for step in stored.draw(range(stored.eligible))]


def test_a_step_is_drawn_with_its_own_observation_and_actions(tmp_path):
    stored = ring(tmp_path)
    stored.add([episode(1, 2), episode(20, 3, success=False, executed=1)], [1.0, -1.0])
    stored.add([episode(50, 1)], [0.5])
    steps = stored.draw([0, 5, 4, 2])  # across files, in the order that is asked
    assert [float(step.observation.state[0, 0]) for step in steps] == [1, 50, 22, 20]
    assert [step.observation.instructions for step in steps] == [["from 1"], ["from 50"], ["from 20"], ["from 20"]]
    for step in steps:
        for observation, place in ((step.observation, 0), (step.tail.observation(1), 1)):
            assert observation.images.shape == (1, 2, 4, 3) and observation.cameras == ("left", "right")
            assert (observation.images == step.observation.state[0, 0] + place).all()
            assert observation.state[0, 0] == step.observation.state[0, 0] + place
    assert [step.actions[:, 0].tolist() for step in steps] == [[10, 11], [500, 501], [220], [200, 201]]
    # of the second episode from its first step: rewards 2, 2.1, 2.2 at 0, 2 and 4 actions, -1 with the last
    to_go = steps[3].tail.rewards
    assert to_go.elapsed.tolist() == [0, 2, 4] and to_go.outcome == -1
    assert to_go.discounted(0.5, 2.0) == pytest.approx(2 * (2 + 2.1 / 4 + 2.2 / 16) - 1 / 16)
    assert steps[2].tail.rewards.discounted(0.5, 0.0) == -1
    first = steps[0].tail
    assert first.rewards.rewards.tolist() == pytest.approx([0.1, 0.2]) and first.rewards.outcome == 1
    assert [step.tail.terminated for step in steps] == [True, True, False, False]
    assert [step.tail.actions for step in steps] == [4, 2, 1, 5]


def test_the_transition_of_a_stored_chunk(tmp_path):
    """Of three steps of two actions and a last one of one: rewards .1 (first + t), -1 with the last."""
    stored = ring(tmp_path)
    stored.add([episode(20, 3, success=False, executed=1), episode(1, 2)], [-1.0, 0.5])
    first, last, end = (step.tail.transition(len(step.actions), 0.5, 2.0) for step in stored.draw([0, 2, 4]))
    assert (first.reward, first.discount, first.terminated) == (pytest.approx(4.0), 0.25, False)
    assert first.next_observation.state.tolist() == [[21.0]]
    assert (last.reward, last.discount, last.terminated) == (pytest.approx(2 * 2.2 - 1), 0.5, False)
    assert last.next_observation.state.tolist() == [[23.0]]  # cut off: its value counts
    assert (end.reward, end.terminated, end.next_observation) == (pytest.approx(2 * 0.2 + 0.5), True, None)


@pytest.mark.parametrize(("chosen", "expected"), [("success", [1, 2, 50]), ("failure", [20, 21, 22])])
def test_steps_of_failures_or_of_successes_may_be_left_out(tmp_path, chosen, expected):
    stored = ring(tmp_path, chosen=chosen)
    stored.add([episode(1, 2), episode(20, 3, success=False)], [1.0, 0.0])
    stored.add([episode(50, 1)], [1.0])
    assert states(stored) == expected


def test_the_oldest_steps_leave_and_their_files_too(tmp_path):
    stored = ring(tmp_path, size=5)
    for first in (0, 10, 20, 30):
        stored.add([episode(first, 3)], [1.0])
    assert states(stored) == [20, 21, 22, 30, 31, 32]  # without 20 .. 22 there were fewer than five
    assert len(list(tmp_path.iterdir())) == 2


def test_files_of_saved_states_stay_as_long_as_these(tmp_path):
    stored = ring(tmp_path, size=3, checkpoints=2)
    saved = []
    for first in (0, 10, 20, 30):
        stored.add([episode(first, 3)], [1.0])
        saved.append(json.loads(json.dumps(stored.state())))
        assert stored.state() == saved[-1]  # a state that is asked for twice is one
    assert names(tmp_path) == ["00000001", "00000002", "00000003"]
    for state, expected in ((saved[3], 30), (saved[2], 20)):
        again = ring(tmp_path, size=3)
        again.load(state)
        assert states(again) == [expected, expected + 1, expected + 2]
    again.add([episode(40, 3)], [1.0])  # takes another turn: what came after is replaced
    assert states(again) == [40, 41, 42] and names(tmp_path) == ["00000002", "00000003"]
    stored = ring(tmp_path, size=3)
    stored.load(saved[3])
    assert states(stored) == [40, 41, 42]


def test_files_of_the_checkpoint_before_stay_while_the_newest_is_written(tmp_path):
    """One checkpoint is kept. The state of the second is already known, but its files may still get lost."""
    source = StoredSteps(steps=2, keep=3)
    source.start(SourceContext(None, None, None, 0, (0, 1), int, tmp_path, checkpoints=1))
    source._ring.add([episode(0, 3)], [1.0])
    first = source.rank_state()
    for begin in (10, 20):
        source._ring.add([episode(begin, 3)], [1.0])
    source.rank_state()
    source._ring.add([episode(30, 3)], [1.0])
    source.load_rank(first)
    assert states(source._ring) == [0, 1, 2]


def test_a_file_that_a_checkpoint_needs_is_named(tmp_path):
    stored = ring(tmp_path)
    stored.add([episode(0, 2)], [1.0])
    state = stored.state()
    path = tmp_path / "00000000.safetensors"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(UserError, match=r"00000000.safetensors cannot be read .* the run cannot be resumed without it"):
        ring(tmp_path).load(state)
    path.unlink()
    with pytest.raises(UserError, match=r"00000000.safetensors cannot be read"):
        ring(tmp_path).load(state)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(
        UserError,
        match=r"rollout.extras \(stored_steps or action_proposals\): .*taken/00000000.safetensors cannot be written",
    ):
        ring(tmp_path / "taken").add([episode(0, 2)], [1.0])


# --- in a run ---

REPLAY = [
    "rollout.extras=[{type: stored_steps, steps: 6}]",
    "algorithm.terms=[{type: likelihood, of: replayed, coefficient: 0.5}]",
    "engine.micro_batch=22",
    "task.train_size=60",  # starts between 0 and 0.6
    "action.chunk=2",
]


@pytest.mark.parametrize("head", ["token", "gaussian"])
def test_what_a_run_stores_is_what_it_did(tmp_path, head):
    settings = {"token": "{type: token, bins: 8}", "gaussian": "{type: gaussian, width: 16, layers: 1}"}[head]
    trainer = make(tmp_path, *REPLAY, f"action.head={settings}", base=ROBOTS)
    source = trainer.collector.extras.sources[0]
    first = trainer.collector.next(0, Metrics(trainer.engine))
    assert (first.origin == FRESH).sum() == 16 and not first.mask[first.origin == REPLAYED].any()
    _, batch = trainer.preparation.minibatches(first, 0, torch.Generator(), Metrics(trainer.engine))
    trainer.collector.observe(batch)
    played = [step for steps in batch.rollouts.inputs[:16] for step in steps]
    assert source._ring.eligible == len(played) > 16
    second = trainer.collector.next(1, Metrics(trainer.engine))
    again = second.select(second.origin == REPLAYED)
    assert len(again) == 6 and again.rewards.isnan().all() and len(again.group.unique()) == 6
    with torch.no_grad():
        logp = trainer.policy.replay(again, trainer.policy.module).logp
        first_logp = trainer.policy.replay(first, trainer.policy.module).logp
    decisions = trainer.policy.module.head.decisions
    by_step = first_logp[:16].unflatten(1, (-1, decisions))
    flat = torch.cat([by_step[row, : len(steps)] for row, steps in enumerate(first.inputs[:16])])
    for row, sample in enumerate(again.samples):
        position = int(sample.prompt.id.split("-")[1])
        before, now = played[position], again.inputs[row][0]
        assert torch.equal(before.valid, now.valid) and torch.equal(before.state, now.state)
        executed = before.sampled["actions"][before.valid].clamp(-1, 1)  # what the simulator was given
        torch.testing.assert_close(executed, now.sampled["actions"][now.valid])
        counted = again.mask[row, :decisions] & (before.sampled["actions"].flatten().abs() <= 1)
        torch.testing.assert_close(logp[row, :decisions][counted], flat[position][counted], atol=1e-4, rtol=1e-4)
        places = float(now.state[0]) + executed[:, 0].cumsum(0)  # the line pays the position after each action
        assert sample.prompt.metadata["tail"].rewards.rewards[0] == pytest.approx(float(places.sum()), abs=1e-4)
    third = trainer.collector.next(2, Metrics(trainer.engine))
    drawn = [[s.prompt.id for s in batch.samples[16:]] for batch in (second, third)]
    assert drawn[0] != drawn[1]
    release(trainer)


def scored_sometimes(sample):
    """None, for unscored, of odd seeds."""
    return None if sample.prompt.metadata["seed"] % 2 else 1.0


def test_episodes_that_are_not_whole_or_not_scored_are_left_out(tmp_path):
    reward = "task.rewards=[{name: tests.collection.test_stored_steps:scored_sometimes}]"
    trainer = make(tmp_path, *REPLAY, reward, base=ROBOTS)
    rollouts = trainer.collector.next(0, Metrics(trainer.engine))
    _, batch = trainer.preparation.minibatches(rollouts, 0, torch.Generator(), Metrics(trainer.engine))
    trainer.collector.observe(batch)
    ring = trainer.collector.extras.sources[0]._ring
    fresh = rollouts.select(rollouts.origin == FRESH)
    scored = [1 for s in fresh.samples if scored_sometimes(s) is not None]
    assert 0 < sum(scored) < 16 and sum(len(segment.lengths) for segment in ring.segments) == sum(scored)
    policy = trainer.policy
    assert [len(one) for one in policy.trajectories(fresh)] == [len(steps) for steps in fresh.inputs]
    lost = replace(fresh.samples[1], episode=replace(fresh.samples[1].episode, lost=True))
    fresh.samples[1] = lost
    endless = fresh.inputs[2][-1]
    fresh.inputs[2][-1] = replace(endless, record=replace(endless.record, actions=endless.record.actions * np.inf))
    fresh.inputs[3] = fresh.inputs[3][:-1]  # without its end
    assert [one is None for one in policy.trajectories(fresh)[:5]] == [False, True, True, True, False]
    release(trainer)


def test_each_rank_draws_for_itself(tmp_path):
    trainer = make(tmp_path / "run", *REPLAY, base=ROBOTS)
    drawn, groups = [], []
    for rank in range(2):
        source = StoredSteps(steps=40)
        context = SourceContext(trainer.policy, trainer.task.train, trainer.task, 0, (rank, 2), int, tmp_path, 1)
        source.start(context)
        source._ring.add([line_episode(60)], [1.0])
        fresh = trainer.policy.rollout([trainer.task.train[0]], 1, [0])
        replayed, later = source.make(fresh), source.make(fresh)
        drawn.append([sample.prompt.id for sample in replayed.samples])
        groups += [*replayed.group.tolist(), *later.group.tolist()]
    assert [len(ids) for ids in drawn] == [20, 20] and drawn[0] != drawn[1]
    assert len(set(groups)) == len(groups) == 80  # of two steps and ranks, each its own
    release(trainer)


def test_the_loss_is_that_of_imitation_where_all_episodes_earn_the_same(tmp_path):
    """Half of the mean -logp of the replayed decisions, as a share of all that are learned from."""
    trainer = make(
        tmp_path,
        *REPLAY,
        "task.rewards=[{name: tests.whole_runs.test_robot_demonstrations:equal}]",
        "steps=2",
        base=ROBOTS,
    )
    batches, usual = [], trainer.collector.next

    def following(step, measured):
        batches.append(usual(step, measured))
        return batches[-1]

    trainer.collector.next = following
    trainer.train()
    release(trainer)
    rows = [row for row in metrics(tmp_path) if "loss" in row]
    assert rows[0]["loss"] == 0
    replayed = batches[1].origin == REPLAYED
    share = (batches[1].mask[replayed].sum() / batches[1].mask.sum()).item()
    assert 0.05 < share < 0.6
    assert rows[1]["loss"] == pytest.approx(-0.5 * share * rows[1]["likelihood"], rel=1e-3)
    assert rows[1]["loss"] > 0.05


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ("{type: grpo}", []),
        pytest.param("{type: ppo, shuffle: steps, minibatches: 2}", [], marks=pytest.mark.slow),
        pytest.param("{type: grpo}", ["rollout.workers={}"], marks=pytest.mark.slow),
    ],
    ids=["grpo", "ppo", "workers"],
)
def test_it_goes_on_exactly(tmp_path, algorithm, more):
    """Two steps of four, and two more from their checkpoint, with a ring so short that files leave it."""
    options = [f"algorithm={algorithm}", REPLAY[0].replace("6}", "6, keep: 40}"), *REPLAY[1:], *more]
    train(tmp_path / "whole", *options, base=ROBOTS)
    train(tmp_path / "parts", *options, "steps=2", "checkpoint.every=2", base=ROBOTS)
    shutil.copytree(tmp_path / "parts", tmp_path / "cut")
    train(tmp_path / "parts", *options, "checkpoint.every=2", resume=True, base=ROBOTS)
    rows = [[row for row in timeless(metrics(tmp_path / name)) if "loss" in row] for name in ("whole", "parts")]
    assert json.dumps(rows[0]) == json.dumps(rows[1]) and len(rows[0]) == 4
    assert distance(final(tmp_path / "whole"), final(tmp_path / "parts")) == 0
    for path in (tmp_path / "cut/stored_steps/rank_0").iterdir():
        path.unlink()
    with pytest.raises(UserError, match="the run cannot be resumed without it"):
        train(tmp_path / "cut", *options, "checkpoint.every=2", resume=True, base=ROBOTS)


@pytest.mark.parametrize(
    ("base", "option", "message"),
    [
        (ROBOTS, "action.head={type: steered}", "needs known answers that it can be trained on beside its rollouts"),
        (TINY, "engine.micro_batch=1", "needs episodes in a simulator, whose observations and actions can be stored"),
    ],
)
def test_a_policy_that_cannot_learn_from_them_is_refused(tmp_path, base, option, message):
    with pytest.raises(UserError, match=message):
        load(base, [f"run_dir={tmp_path}", REPLAY[0], option])


def test_rewards_to_go_of_one_step():
    assert RewardsToGo(np.array([3.0]), np.array([0]), 0.25).discounted(0.9, 2.0) == 6.25
