"""Chunks that Q networks choose among while episodes are played: which one, by hand, and where none can be chosen."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mmrl.checkpoints.networks import FILE
from mmrl.cli.main import main as cli
from mmrl.core.values import QEnsemble
from mmrl.errors import UserError
from mmrl.job import Job
from mmrl.policies.vla.heads.head import ActionSampling
from mmrl.samplers.chain import derive_seed
from tests.joints.parts import close
from tests.joints.test_q_gradient import HEADS, Q, options, prepared
from tests.joints.test_q_weighted import RECORDED
from tests.whole_runs.parts import ROBOTS, distance, final, make, metrics, release, timeless, train

pytestmark = pytest.mark.usefixtures("alone")
WIDE = "{type: gaussian, layers: 0, std: 0.5}"


def of_actions(monkeypatch, *values):
    """Q networks that are functions of a chunk's first action, which is before the second and the mask of both."""
    monkeypatch.setattr(
        QEnsemble, "forward", lambda self, x: torch.stack([value(x[:, -4]).double() for value in values])
    )


@pytest.mark.parametrize(("of", "best"), [("least", lambda a: torch.minimum(a, -3.0 * a)), ("mean", lambda a: -a)])
def test_the_best_of_several_chunks_is_played_by_hand(tmp_path, monkeypatch, of, best):
    """Q values of a_1 and -3 a_1 within [-1, 1]: their least is largest near 0, their mean at the smallest action.
    Candidates are sampled with seeds that the step's seed gives, the first with this seed itself."""
    trainer, *_ = prepared(tmp_path, *options(WIDE, q=f", best_of: {{count: 5, of: {of}}}"))
    of_actions(monkeypatch, lambda a: a, lambda a: -3.0 * a)
    policy, prompts = trainer.policy, [trainer.task.train[i] for i in range(6)]
    played = policy.rollout(prompts, 1, range(100, 106))
    chosen = set()
    for row, seed in enumerate(range(100, 106)):
        for t, step in enumerate(played.inputs[row][:2]):
            first = derive_seed(seed, t)
            seeds = [first, *(derive_seed(first, k) for k in range(1, 5))]
            with torch.no_grad():
                prefix = policy.module.encode(policy.collate([step.observation] * 5))
                state = policy.module.policy_state(torch.stack([step.state] * 5))
                actions = policy.module.head.act(prefix, state, ActionSampling(seeds))["actions"]
            index = int(best(actions[:, 0, 0].clamp(-1, 1)).argmax())
            close(step.sampled["actions"], actions[index], atol=1e-6)
            chosen.add(index)
    assert len(chosen) > 2
    again = policy.rollout(prompts, 1, range(100, 106))
    assert all(
        torch.equal(a.sampled["actions"], b.sampled["actions"])
        for one, other in zip(played.inputs, again.inputs, strict=True)
        for a, b in zip(one, other, strict=True)
    )
    release(trainer)


def test_before_q_learns_the_policy_plays_alone(tmp_path, monkeypatch):
    """Nothing is stored in the first training step, so that the first two play as without a choice, and ask no Q
    network."""
    ready, played = [], []
    for name, best in (("alone", ""), ("best", ", best_of: {count: 3}")):
        trainer, rollouts, _ = prepared(tmp_path / name, *options(WIDE, q=best))
        ready.append(trainer.policy.choice is not None and trainer.policy.choice.ready())
        played.append([step.sampled["actions"] for row in rollouts.inputs[:8] for step in row])
        release(trainer)
    assert ready == [False, True]
    of_actions(monkeypatch, lambda a: 1 / 0)
    trainer = make(tmp_path / "first", *options(WIDE, q=", best_of: {count: 3}"), base=ROBOTS)
    trainer.policy.rollout([trainer.task.train[0]], 1, [3])
    release(trainer)
    assert len(played[0]) == len(played[1]) and all(map(torch.equal, *played))


def test_held_out_episodes_are_played_by_it(tmp_path, monkeypatch):
    """Q of the first action: episodes on the line, whose goal is at its upper end, end sooner."""
    lengths = []
    for name, best in (("alone", ""), ("best", ", best_of: {count: 6}")):
        trainer, *_ = prepared(tmp_path / name, *options(WIDE, q=best), "evaluation.temperature=1.0")
        of_actions(monkeypatch, lambda a: a, lambda a: a)
        samples = trainer.policy.respond([trainer.task.train[i] for i in range(12)], range(12))
        lengths.append(sum(sample.episode.reward for sample in samples))
        release(trainer)
        monkeypatch.undo()
    assert lengths[1] > lengths[0], lengths


def test_it_goes_on_exactly(tmp_path):
    settings = options(WIDE, q=", updates: 2, batch: 6, best_of: {count: 3}")
    train(tmp_path / "whole", *settings, "steps=5", base=ROBOTS)
    train(tmp_path / "parts", *settings, "steps=3", "checkpoint.every=3", base=ROBOTS)
    train(tmp_path / "parts", *settings, "steps=5", "checkpoint.every=3", resume=True, base=ROBOTS)
    rows = [[row for row in timeless(metrics(tmp_path / name)) if "loss" in row] for name in ("whole", "parts")]
    assert json.dumps(rows[0]) == json.dumps(rows[1]) and len(rows[0]) == 5
    assert distance(final(tmp_path / "whole"), final(tmp_path / "parts")) == 0


def test_implicit_q_learning_chooses_too(tmp_path):
    q = "q: {width: 16, members: 2, lr: 0.01, tau: 0.25, best_of: {count: 2}}"
    trainer, *_ = prepared(
        tmp_path,
        *RECORDED,
        f"algorithm={{type: implicit_q_learning, {q}}}",
        f"action.head={HEADS['gaussian']}",
        steps=1,
    )
    assert trainer.policy.choice.count == 2 and trainer.policy.choice.ready()
    release(trainer)


# --- evaluation of saved weights ---


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of four steps with two Q networks of width 16, which choose among five chunks."""
    folder = tmp_path_factory.mktemp("finished")
    settings = [*options(WIDE, q=", updates: 4, best_of: {count: 5}"), "evaluation={every: 2, temperature: 1.0}"]
    train(folder, *settings, "steps=4", "checkpoint.best=true", base=ROBOTS)
    return folder


def best_chunks(policy, tensors, rows, states, seeds):
    """Of five chunks that the head samples at each of n observations those with the highest least Q, [n, chunk,
    action], and their numbers. rows: prepared observations; states, seeds: [n]. tensors: the file of Q networks, which
    read features, state, actions and the mask of executed ones."""
    with torch.no_grad():
        prefix, state = policy.module.encode(policy.collate(rows)), policy.module.policy_state(states)
        by_candidate = [seeds, *([derive_seed(seed, k) for seed in seeds] for k in range(1, 5))]
        sampled = [policy.module.head.act(prefix, state, ActionSampling(each))["actions"] for each in by_candidate]
        chunks = torch.stack(sampled, 1)
        observed = torch.cat([prefix.last, states], 1)[:, None].expand(-1, 5, -1)
        pairs = torch.cat([observed, chunks[..., 0].clamp(-1, 1), torch.ones(len(seeds), 5, 2)], 2)
        networks = QEnsemble(pairs.shape[2], 16, 2, seed=0)
        networks.load_state_dict(tensors)
        indices = networks(pairs.flatten(0, 1)).amin(0).view(-1, 5).argmax(1)
    return chunks[torch.arange(len(seeds)), indices], indices.tolist()


@pytest.mark.parametrize("name", ["final", "best"])
def test_saved_weights_play_the_chunk_with_the_highest_q(finished, name):
    tensors = load_file(finished / name / FILE)
    with Job.from_weights(finished / name) as job:
        policy, chosen = job.policy, set()
        played = policy.rollout([job.task.train[i] for i in range(6)], 1, range(100, 106))
        for row, seed in enumerate(range(100, 106)):
            for t, step in enumerate(played.inputs[row]):
                seeds = [derive_seed(seed, t)]
                chunk, index = best_chunks(policy, tensors, [step.observation], step.state[None], seeds)
                close(step.sampled["actions"], chunk[0], atol=1e-6)
                chosen |= set(index)
        assert len(chosen) > 2
        observation = policy.sim.reset([0, 30], ["go"] * 2).select(np.arange(2))  # as a robot's client sends it
        state = policy.robot_state(observation)
        chunk, _ = best_chunks(policy, tensors, policy.prepare(observation), state, [7, 8])
        close(policy.act(observation, [7, 8], 1.0), chunk.clamp(-1, 1), atol=1e-6)


def test_mmrl_eval_measures_what_the_run_measured(finished):
    """The last evaluation of the run and `mmrl eval`, episode by episode; without Q the episodes are others."""
    last = [row for row in metrics(finished) if "evaluation/episode/return" in row][-1]
    found = {}
    for best in ("", "algorithm.q.best_of=null"):
        with pytest.raises(SystemExit, match="0"):
            cli(["eval", str(finished), "evaluation.decoding=greedy", *([best] if best else [])])
        found[best] = json.loads((finished / "evaluation.json").read_text())["evaluation/episode/return"]
    assert found[""] == last["evaluation/episode/return"] != found["algorithm.q.best_of=null"]


# --- refusals ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("algorithm={type: ppo, q: {best_of: {count: 2}}}", "algorithm.q"),
        (f"algorithm.terms=[{{type: q_gradient, {Q}, best_of: {{count: 2}}}}}}]", "best_of"),
        ("algorithm.q.best_of.count=1", "algorithm.q.best_of.count"),
        ("rollout.workers={count: 1}", r"algorithm.q.best_of chooses by Q networks, which rollout.workers do not have"),
    ],
)
def test_jobs_without_q_networks_are_refused(tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        release(make(tmp_path, *options(WIDE, q=", best_of: {count: 2}"), change, base=ROBOTS))


def test_weights_without_q_networks_are_refused(tmp_path):
    """The only training step stores its episodes, so that no Q network exists at its end."""
    train(tmp_path / "run", *options(WIDE, q=", best_of: {count: 2}"), "steps=1", base=ROBOTS)
    message = (
        r"algorithm.q.best_of chooses by Q networks, which the weights in .*run/final do not have; "
        r"set algorithm.q.best_of=null to play the policy alone"
    )
    with pytest.raises(UserError, match=message), Job.from_weights(tmp_path / "run"):
        pass
    with Job.from_weights(tmp_path / "run", overrides=["algorithm.q.best_of=null"]) as job:
        assert job.policy.choice is None


def test_saved_q_networks_that_do_not_fit_are_refused(finished):
    for change, message in (
        ("algorithm.q.width=8", "have other sizes than q.members=2 of q.width=8 for this policy"),
        ("algorithm.q.members=3", "have other sizes than q.members=3 of q.width=16 for this policy"),
    ):
        with pytest.raises(UserError, match=message), Job.from_weights(finished, overrides=[change]):
            pass


def test_a_damaged_file_of_q_networks_is_named(finished, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(finished, broken)
    (broken / "final" / FILE).write_bytes(b"not safetensors")
    with pytest.raises(UserError, match=f"final/{FILE} cannot be read"), Job.from_weights(broken):
        pass
