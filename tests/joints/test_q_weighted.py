"""Q functions by hand: targets, expectiles, Polyak averages, and from the YAML key to weights of recorded steps."""

import copy
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import rankdata

from mmrl.core.values import QEnsemble, ValueNetwork, expectile_error, td_target
from mmrl.errors import UserError
from mmrl.measurements.q_values import ESTIMATES, in_parts
from mmrl.protocols.batch import Batch
from mmrl.protocols.trajectory import EpisodeTail, RewardsToGo
from mmrl.rollouts import Column, Prompt, Rollouts, Sample
from mmrl.terms.losses.advantage_weighted import StepReturns
from mmrl.terms.losses.q_weighted import QNetworks, report_agreement
from mmrl.training.metrics import Metrics
from tests.joints.parts import Table, close
from tests.whole_runs.parts import ROBOTS, call, distance, final, make, metrics, release, timeless, train

pytestmark = pytest.mark.usefixtures("alone")
RECORDED = [
    "task.demonstrations={type: expert, episodes: 11, noise: 0.4, successful: false, actions: executed}",
    "task.train_size=11",
    "rollout={prompts: 20}",
    "engine.micro_batch=7",
    "action.chunk=2",
]
Q = "q: {width: 16, members: 3, lr: 0.01, tau: 0.25, expectile: 0.8}"
LEARNING = [*RECORDED, f"algorithm={{type: implicit_q_learning, returns: {{gamma: 0.5}}, {Q}}}"]
STORED = [
    "rollout.extras=[{type: stored_steps, steps: 6}]",
    f"algorithm.terms=[{{type: q_weighted, coefficient: 0.5, returns: {{gamma: 0.5, simulator_reward: 1.0}}, {Q}}}]",
    "engine.micro_batch=22",
    "task.train_size=60",
    "action.chunk=2",
]


# --- numbers by hand ---


def test_the_target_of_a_q_network_by_hand():
    reward, discount = torch.tensor([1.0, 1.0]), torch.tensor([0.25, 0.25])
    close(td_target(reward, discount, torch.tensor([False, True]), torch.tensor([8.0, 8.0])), [3.0, 1.0])


def test_the_least_target_counts_and_targets_follow_by_a_share():
    ensemble = QEnsemble(2, 4, 3, seed=0)
    x = torch.tensor([[0.0, 1.0], [2.0, -1.0]])
    for bias, online, target in zip((1.0, -2.0, 3.0), ensemble.online, ensemble.targets, strict=True):
        online.layers[-1].bias.data.fill_(bias)
        assert not any(p.requires_grad for p in target.parameters())
    close(ensemble(x).detach(), [[1.0, 1.0], [-2.0, -2.0], [3.0, 3.0]])
    close(ensemble.target(x), [0.0, 0.0])  # as at the beginning
    ensemble.update_targets(0.25)
    close(torch.stack([network(x) for network in ensemble.targets]).detach(), [[0.25] * 2, [-0.5] * 2, [0.75] * 2])
    close(ensemble.target(x), [-0.5, -0.5])
    first, second = (network.layers[0].weight for network in ensemble.online[:2])
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("actions", "expected"),
    [
        (1, (2.0, 0.5, "next 1", False)),
        (2, (2.0 + 4.0 / 2, 0.25, "next 2", False)),
        (3, (2.0 + 4.0 / 2 + 6.0 / 4 + 5.0 / 4, 0.125, None, True)),
        (9, (2.0 + 4.0 / 2 + 6.0 / 4 + 5.0 / 4, 0.125, None, True)),
    ],
)
def test_the_transition_of_a_chunk_by_hand(actions, expected):
    """Rewards 1, 2 and 3, twice, and an outcome of 5 with the last; a discount of 1/2."""

    class Tail(EpisodeTail):
        def observation(self, step):
            return f"next {step}"

    tail = Tail(RewardsToGo(np.array([1.0, 2, 3]), np.array([0, 1, 2]), 5.0), actions=3, terminated=True)
    transition = tail.transition(actions, gamma=0.5, simulator_reward=2.0)
    found = (transition.reward, transition.discount, transition.next_observation, transition.terminated)
    assert found == expected


def test_no_observation_is_encoded_where_there_is_none():
    def encode(observations):
        sizes.append(len(observations))
        return torch.tensor([[float(one), 0.0] for one in observations])

    sizes = []
    assert in_parts(encode, [], 2, 2).shape == (0, 2) and not sizes
    close(in_parts(encode, [1, 2, 3], 2, 2)[:, 0], [1.0, 2.0, 3.0])
    assert sizes == [2, 1]


# --- through the trainer's own path ---


def step_once(folder, *options, base=ROBOTS, step=0):
    trainer = make(folder, *options, base=base)
    rollouts = trainer.collector.next(step, Metrics(trainer.engine))
    measured = Metrics(trainer.engine)
    minibatches, batch = trainer.preparation.minibatches(rollouts, step, torch.Generator().manual_seed(0), measured)
    return trainer, rollouts, minibatches, batch, measured


def estimates(rollouts):
    """Views of the columns, by name."""
    (values,) = [record.values for name, record in rollouts.extras.items() if name.startswith("q_values")]
    return SimpleNamespace(**dict(zip(ESTIMATES, values.unbind(1), strict=True)))


def transitions_by_hand(trainer, rollouts):
    """What an episode on the line shows of each step: state and actions, reward, discount, end, next state."""
    episodes = {episode.name: episode for episode in trainer.task.demonstrations.episodes}
    rows = []
    for sample in rollouts.samples:
        name, t = sample.prompt.id.rsplit("-", 1)
        episode, t = episodes[name], int(t)
        length = len(episode.actions)
        chunk = episode.actions[t : t + 2]
        end = t + len(chunk) == length
        solved = episode.rewards.outcome
        reward = solved * 0.5 ** (length - 1 - t) if end else 0.0
        following = episode.final.state[0] if end else episode.state[t + 2]
        rows.append((episode.state[t], chunk, reward, 0.5 ** len(chunk), end and bool(solved), following))
    return rows


def test_recorded_steps_reach_q_networks_as_they_were(tmp_path):
    """Encodings hold the state, the actions and which were executed; networks and both losses are done again here, from
    the same weights, by the definition."""
    trainer, rollouts, _, batch, measured = step_once(tmp_path, *LEARNING)
    policy, found = trainer.policy, estimates(rollouts)
    rows = transitions_by_hand(trainer, rollouts)
    prompts = [sample.prompt for sample in rollouts.samples]
    observations = policy.off_policy.encode_observations([prompt.metadata["observation"] for prompt in prompts])
    chunks = policy.off_policy.encode_chunks([prompt.metadata["actions"] for prompt in prompts])
    width, chunk_width = policy.off_policy.encoding_sizes
    assert observations.shape == (20, width) and chunks.shape == (20, chunk_width)
    states = torch.tensor(np.stack([row[0] for row in rows]))
    close(observations[:, -states.shape[1] :], states)
    size = rows[0][1].shape[1]
    for encoded, (_, chunk, *_) in zip(chunks, rows, strict=True):
        actions = encoded[: 2 * size].reshape(2, size)
        close(actions[: len(chunk)], chunk)
        assert not actions[len(chunk) :].any()
        assert encoded[2 * size :].tolist() == [1.0, float(len(chunk) == 2)]
    assert {len(row[1]) for row in rows} == {1, 2} and {row[4] for row in rows} == {False, True}
    # The first estimates: all networks begin at 0, so V's target is 0, and V stays there; Q' is 0.
    close(found.q, torch.zeros(20))
    close(found.value, torch.zeros(20))
    rewards = torch.tensor([row[2] for row in rows])
    close(found.td_error, rewards.square(), atol=1e-6)  # (r + discount V(s') - 0)^2
    assert measured.result()["q/td_error"] == pytest.approx(float(rewards.square().mean()), rel=1e-5)
    release(trainer)


def test_two_steps_of_learning_by_the_definition(tmp_path):
    trainer, rollouts, *_ = step_once(tmp_path, *LEARNING)
    modules = trainer.preparation.modules
    (value,) = [m for name, m in modules._modules.items() if name.endswith("value")]
    (q,) = [m for name, m in modules._modules.items() if name.endswith(" q")]
    assert value.updates == q.updates == 1 and len(q.module.online) == 3
    # What comes next is done by hand beside it, from copies.
    value_copy, q_copy = copy.deepcopy(value), copy.deepcopy(q)
    second = trainer.collector.next(1, Metrics(trainer.engine))
    trainer.preparation.minibatches(second, 1, torch.Generator().manual_seed(1), Metrics(trainer.engine))
    found, rows = estimates(second), transitions_by_hand(trainer, second)
    policy = trainer.policy
    observation = policy.off_policy.encode_observations([s.prompt.metadata["observation"] for s in second.samples])
    pairs = torch.cat([observation, policy.off_policy.encode_chunks([row[1] for row in rows])], 1)
    finals = []
    for sample, row in zip(second.samples, rows, strict=True):
        tail = sample.prompt.metadata["tail"]
        following = tail.observation(len(row[1]))
        assert np.array_equal(following.state[0], row[5])
        finals.append(following)
    following = policy.off_policy.encode_observations(finals)
    reward, discount = (torch.tensor([row[i] for row in rows], dtype=torch.float64) for i in (2, 3))
    terminated = torch.tensor([row[4] for row in rows])

    least = torch.stack([network(pairs) for network in q_copy.module.targets]).amin(0).detach()
    difference = least - value_copy.module(observation)
    loss = torch.where(difference < 0, 0.2, 0.8) * difference.square()
    value_copy.update(loss.mean())
    now = value_copy.module(observation).detach()
    target = reward + discount * torch.where(terminated, 0.0, value_copy.module(following).detach())
    errors = torch.stack([(network(pairs) - target).square() for network in q_copy.module.online])
    q_copy.update(errors.sum(0).mean())
    before = copy.deepcopy(q_copy.module.targets)
    close(found.q, least.float(), atol=1e-6)
    close(found.value, now.float(), atol=1e-6)
    close(found.td_error, errors.detach().mean(0).float(), atol=1e-6)
    for mine, theirs in zip(q_copy.module.online.parameters(), q.module.online.parameters(), strict=True):
        close(mine.detach(), theirs.detach(), atol=1e-9)
    for old, online, theirs in zip(
        before.parameters(), q.module.online.parameters(), q.module.targets.parameters(), strict=True
    ):
        close((0.75 * old + 0.25 * online).detach(), theirs.detach(), atol=1e-9)
    assert float(found.q.abs().max()) > 1e-3
    release(trainer)


def test_weights_and_signs_of_recorded_steps(tmp_path):
    """The gradient of a batch is the one of imitation with exp(Q - V) as weights."""
    trainer, rollouts, minibatches, batch, _ = step_once(tmp_path, *LEARNING)
    given = torch.linspace(-1.0, 1.0, 20)
    for micro in minibatches[0]:
        record = estimates(micro)
        rows = [[s.prompt.id for s in rollouts.samples].index(sample.prompt.id) for sample in micro.samples]
        record.q[:], record.value[:] = given[rows] + 0.5, 0.5
    measured = Metrics(trainer.engine)
    trainer.update(minibatches[0], measured)
    result = measured.result()
    ids = [[s.prompt.id for s in rollouts.samples].index(s.prompt.id) for m in minibatches[0] for s in m.samples]
    counted = torch.cat([micro.mask.sum(1) for micro in minibatches[0]]).float()
    weights = given[ids].exp()
    assert result["q_learning/weight"] == pytest.approx(float((weights * counted).sum() / counted.sum()), rel=1e-4)
    assert result["q_learning/advantage"] == pytest.approx(
        float((given[ids] * counted).sum() / counted.sum()), abs=1e-4
    )
    fresh = make(tmp_path / "again", *LEARNING, base=ROBOTS)
    loss = 0.0
    for micro in minibatches[0]:
        logp = fresh.policy.replay(micro, fresh.policy.module).logp
        rows = [[s.prompt.id for s in rollouts.samples].index(sample.prompt.id) for sample in micro.samples]
        loss = loss - (given[rows].exp()[:, None] * logp).where(micro.mask, 0).sum() / counted.sum()
    assert result["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    release(trainer)
    release(fresh)


def test_an_episode_that_was_cut_off_teaches_v_and_no_target(tmp_path):
    """Without the observation after the last action a step has no target, unless its episode terminated."""
    trainer = make(tmp_path, *LEARNING, "rollout.prompts=60", base=ROBOTS)
    shown = trainer.task.demonstrations
    shown.episodes = [copy.copy(episode) for episode in shown.episodes]
    for episode in shown.episodes:
        object.__setattr__(episode, "final", None)
    rollouts = trainer.collector.next(0, Metrics(trainer.engine))
    trainer.preparation.minibatches(rollouts, 0, torch.Generator().manual_seed(0), Metrics(trainer.engine))
    found, rows = estimates(rollouts), transitions_by_hand_ends(trainer, rollouts)
    assert found.td_error.isnan().tolist() == [end and not solved for end, solved in rows]
    assert any(found.td_error.isnan()) and not found.q.isnan().any()
    # The first update of the Q networks, by the definition, on the steps with a target alone: their Q and V(s') are 0.
    known = ~found.td_error.isnan()
    fresh = QEnsemble(sum(trainer.policy.off_policy.encoding_sizes), 16, 3, trainer.config.seed + 1)
    prompts = [sample.prompt for sample in rollouts.samples]
    pairs = torch.cat(
        [
            trainer.policy.off_policy.encode_observations([prompt.metadata["observation"] for prompt in prompts]),
            trainer.policy.off_policy.encode_chunks([prompt.metadata["actions"] for prompt in prompts]),
        ],
        1,
    )
    steps = [prompt.metadata["tail"].transition(2, 0.5, 0.0) for prompt in prompts]
    rewards = torch.tensor([step.reward for step in steps], dtype=torch.float64)
    (fresh(pairs[known]) - rewards[known]).square().sum(0).mean().backward()
    (q,) = [m for name, m in trainer.preparation.modules._modules.items() if name.endswith(" q")]
    for mine, state in zip(fresh.online.parameters(), q.optimizer.state.values(), strict=True):
        close(state["exp_avg"] / 0.1, mine.grad, atol=1e-6)  # Adam's mean of gradients after one of them
    release(trainer)


def transitions_by_hand_ends(trainer, rollouts):
    episodes = {episode.name: episode for episode in trainer.task.demonstrations.episodes}
    found = []
    for sample in rollouts.samples:
        name, t = sample.prompt.id.rsplit("-", 1)
        found.append((int(t) + 2 >= len(episodes[name].actions), bool(episodes[name].rewards.outcome)))
    return found


def test_the_rank_correlation_with_what_was_earned(tmp_path):
    trainer, rollouts, _, batch, _ = step_once(tmp_path, *LEARNING)
    record = estimates(rollouts)
    record.q[:] = torch.tensor([math.sin(3.0 * i) for i in range(20)])
    trainer.algorithm.prepare(batch)
    earned = [sample.prompt.metadata["tail"].rewards.discounted(0.5, 0.0) for sample in rollouts.samples]
    ranks = [rankdata(record.q.numpy()), rankdata(earned)]
    expected = np.corrcoef(*ranks)[0, 1]
    assert batch.reports["q/rank_correlation"] == pytest.approx(expected, abs=1e-6)
    release(trainer)


def test_proposals_have_no_part_in_the_rank_correlation():
    """Q of 1, 2 and 3 where steps earned 1, 3 and 2: 1/2. Nobody knows what two proposals at the last step would."""

    def sample(earned, **metadata):
        rewards = RewardsToGo(np.array([0.0], np.float32), np.array([0]), earned)
        return Sample(Prompt("step", "go", metadata={"tail": SimpleNamespace(rewards=rewards), **metadata}))

    samples = [sample(1.0), sample(3.0), sample(2.0), *[sample(2.0, proposal=np.zeros((2, 1)))] * 2]
    rollouts = Rollouts(samples, [0] * 5, torch.arange(5), torch.ones(5, 1).bool())
    returns = StepReturns()
    measured = QNetworks().measurement(returns)
    columns = torch.tensor([[1.0, 2.0, 3.0, 9.0, 0.0], [0.0] * 5, [4.0, 2.0, 0.0, math.nan, math.nan]]).T
    rollouts.extras[measured.name] = Column(columns)
    batch = Batch(rollouts, ["mark"], [1.0])
    report_agreement(batch, measured, returns)
    assert batch.reports == pytest.approx({"q/td_error": 2.0, "q/rank_correlation": 0.5})


def test_stored_steps_beside_ppo(tmp_path):
    """The ring is empty in the first step; in the second six stored steps are imitated, and no fresh episode."""
    trainer = make(tmp_path, *STORED, base=ROBOTS)
    rows = []
    for step in range(2):
        rollouts = trainer.collector.next(step, Metrics(trainer.engine))
        measured = Metrics(trainer.engine)
        minibatches, batch = trainer.preparation.minibatches(rollouts, step, torch.Generator().manual_seed(0), measured)
        trainer.update(minibatches[0], measured)
        trainer.collector.observe(batch)
        rows.append((estimates(rollouts), rollouts, measured.result()))
    first, second = rows
    assert first[0].q.isnan().all() and "q_weighted/weight" not in first[2]
    stored = ["tail" in sample.prompt.metadata for sample in second[1].samples]
    assert sum(stored) == 6 and (~second[0].q.isnan()).tolist() == stored
    assert second[2]["q_weighted/weight"] == pytest.approx(1.0)  # Q' and V begin at 0
    assert second[2]["q/td_error"] > 0
    replay = trainer.policy.replay(second[1], trainer.policy.module)
    losses, _ = trainer.algorithm.terms[0].values(second[1], replay)
    mask = second[1].mask & torch.tensor(stored)[:, None]
    close(losses[mask], -0.5 * replay.logp[mask])  # the coefficient, and weights of 1
    assert not losses[~torch.tensor(stored)].any()
    release(trainer)


@pytest.mark.parametrize("options", [LEARNING, STORED], ids=["recorded", "stored"])
def test_it_goes_on_exactly_and_learns_what_is_earned(tmp_path, options):
    train(tmp_path / "whole", *options, "steps=10", base=ROBOTS)
    train(tmp_path / "parts", *options, "steps=5", "checkpoint.every=5", base=ROBOTS)
    train(tmp_path / "parts", *options, "steps=10", "checkpoint.every=5", resume=True, base=ROBOTS)
    rows = [[row for row in timeless(metrics(tmp_path / name)) if "loss" in row] for name in ("whole", "parts")]
    assert json.dumps(rows[0]) == json.dumps(rows[1]) and len(rows[0]) == 10
    assert distance(final(tmp_path / "whole"), final(tmp_path / "parts")) == 0
    errors = [row["q/td_error"] for row in rows[0] if "q/td_error" in row]
    assert sum(errors[-3:]) < sum(errors[:3])


def run(folder):
    """Four steps of a policy that hardly moves: Adam makes rounding of its tiny gradients a visible difference."""
    options = ("steps=4", "rollout.prompts=24", "engine.micro_batch=24", "optim.lr=1e-12")
    train(folder, *LEARNING, *options, base=ROBOTS)


def test_two_ranks_learn_what_one_does(tmp_path):
    """Gradients and counts are summed over ranks: the networks, and so the weights of steps, are those of one rank."""
    for name, ranks in (("one", 1), ("two", 2)):
        call(run, tmp_path / name, log=tmp_path / f"{name}.log", ranks=ranks)
    names = ("q/td_error", "q_learning/weight", "q_learning/advantage", "q_learning/value", "loss", "grad_norm")
    one, two = (
        [[row[name] for name in names] for row in metrics(tmp_path / run) if "loss" in row] for run in ("one", "two")
    )
    close(one, two, atol=1e-5)
    assert len(one) == 4 and len({row[0] for row in one}) == 4 and one[-1][2] != 0  # and both networks learned


# --- refusals ---


def test_an_episode_that_does_not_say_what_it_earned_is_named(tmp_path):
    trainer = make(tmp_path, *LEARNING, base=ROBOTS)
    for episode in trainer.task.demonstrations.episodes:
        object.__setattr__(episode, "rewards", None)
    rollouts = trainer.collector.next(0, Metrics(trainer.engine))
    with pytest.raises(UserError, match=r"implicit_q_learning: the recorded episode of .* has no reward"):
        trainer.preparation.minibatches(rollouts, 0, torch.Generator().manual_seed(0), Metrics(trainer.engine))
    release(trainer)


def test_models_without_encodings_are_refused(given):
    table = Table([[-1.0]], group=[0], rewards=[0.0])
    with pytest.raises(UserError, match=r"algorithm.terms.0 \(q_weighted\) needs .*vision_language_action"):
        given(table, "algorithm.terms=[q_weighted]")


def test_expectiles_by_hand():
    close(expectile_error(torch.tensor([2.0, -2.0]), 0.8), [3.2, 0.8])
    assert ValueNetwork(2, 4, 0, layer_norm=True).layers[1].weight.dtype == torch.float64
