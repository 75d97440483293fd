"""The manipulation task: start states, demonstrations, rewards, and whom instructions belong to."""

import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from mmrl.core.advantages import combined_reward
from mmrl.errors import UserError
from mmrl.rollouts import Episode, Prompt, Sample
from mmrl.tasks.manipulation import episodes, tiny_model
from mmrl.tasks.manipulation.episodes import (
    MAX_CHUNK,
    ActionDisturber,
    Disturbance,
    EpisodeDemonstrations,
    EpisodeSource,
    record_expert,
)
from tests.tasks.choosing import build

LINE = {"simulator": "tests.sims.line_simulator:Line", "tasks": ["go"]}
EPISODE = Episode("go", success=True, success_at_end=False, length=3, reward=1.5)


def seeds(source, n):
    return {source[i].metadata["seed"] for i in range(n)}


def test_training_and_held_out_starts_never_meet():
    held_out = build("manipulation", {**LINE, "eval_size": 1_000_000, "eval_seed": 999_999}, 0).evaluation
    latest = held_out[len(held_out) - 1].metadata["seed"]
    tasks = [build("manipulation", {**LINE, "train_size": 1000}, seed) for seed in (0, 1)]
    assert latest < min(seeds(tasks[0].train, 1000))
    assert not seeds(tasks[0].train, 1000) & seeds(tasks[1].train, 1000)
    assert len(seeds(tasks[0].train, 1000)) == 1000


def test_tasks_take_turns_and_share_seeds():
    source = EpisodeSource(["reach", "lift"], 4, 10)
    assert [(p.metadata["task"], p.metadata["seed"]) for p in (source[i] for i in range(4))] == [
        ("reach", 10),
        ("lift", 10),
        ("reach", 11),
        ("lift", 11),
    ]
    with pytest.raises(IndexError):
        source[4]


def test_every_word_of_the_tabletop_is_known():
    tasks = ["reach", "push", "lift", "pick_and_place", "stack"]
    task = build("manipulation", {"tasks": tasks, "options": {"image_size": 8}}, 0)
    tokenizer = tiny_model.build_tokenizer()
    with task.make_simulator(20) as sim:
        for seed in range(0, 60, 20):
            told = sim.reset(range(seed, seed + 20), [task.evaluation[i].metadata["task"] for i in range(20)])
            for instruction in told.instructions:
                assert tiny_model.UNKNOWN not in tokenizer.tokenize(
                    f"What action should the robot take to {instruction}?"
                )
                assert set(instruction.split()) <= set(tiny_model.WORDS)


def test_the_expert_is_recorded_step_by_step():
    """On the line it always moves by 0.25: from 0.2 it needs 4 moves, and each image shows the seed it started from."""
    with build("manipulation", LINE, 0).make_simulator(2) as sim:
        made = record_expert(
            sim, [("go", 20), ("go", 60), ("go", 70)], disturbance=Disturbance(), successful_only=True, seed=0
        )
    assert [len(episode.actions) for episode in made] == [4, 2, 2]
    np.testing.assert_allclose(made[0].state[:, 0], [0.2, 0.45, 0.7, 0.95], atol=1e-6)
    assert made[0].images[0].flat[0] == 20 and made[0].instruction == "go from 0.20"
    source = EpisodeDemonstrations(made)
    assert len(source) == 8
    shown = source[1].metadata
    assert shown["actions"].tolist() == [[0.25]] * 3 and shown["observation"].state.tolist() == [[pytest.approx(0.45)]]
    assert all(len(source[i].metadata["actions"]) <= MAX_CHUNK for i in range(8))


def test_noise_disturbs_what_is_done_not_what_is_shown():
    with build("manipulation", LINE, 0).make_simulator(4) as sim:
        starts = [("go", seed) for seed in (0, 10, 20, 30)]
        made = record_expert(sim, starts, disturbance=Disturbance(0.1), successful_only=False, seed=0)
        again = record_expert(sim, starts, disturbance=Disturbance(0.1), successful_only=False, seed=0)
        with pytest.raises(UserError, match="none of the expert's 1 episodes succeeded"):
            record_expert(sim, [("go", 0)], disturbance=Disturbance(50.0), successful_only=True, seed=4)
    steps = np.concatenate([np.diff(episode.state[:, 0]) for episode in made])
    assert steps.std() > 0.05 and all((episode.actions == 0.25).all() for episode in made)
    for one, two in zip(made, again, strict=True):
        assert (one.state == two.state).all()


class Drawn:
    """Gives the numbers that it was made with, one call after the other."""

    def __init__(self, *draws):
        self.draws = list(draws)

    def standard_normal(self, shape):
        return np.zeros(shape)

    def random(self, count):
        return np.array(self.draws.pop(0))

    def uniform(self, low, high, shape):
        assert (low, high) == (-1, 1)
        return np.reshape(self.draws.pop(0), shape)


def test_a_perturbation_lasts_and_ends():
    """Environment 0 goes astray at the second action, for two, and environment 1 at the third. A draw below the chance
    of 0.25 begins one; none begins while another lasts."""
    drawn = Drawn([0.9, 0.9], [0.1, 0.2], [0.1, 0.9], [0.3, 0.4], [0.1, 0.1], [0.5, 0.6], [0.9, 0.1], [0.7, 0.8])
    disturbed = ActionDisturber(Disturbance(probability=0.25, length=2), 2, drawn)
    wanted = np.full((2, 1, 1), -1, np.float32)
    found = [disturbed.disturb(wanted)[:, 0, 0].tolist() for _ in range(4)]
    assert found == [[-1, -1], [0.3, -1], [0.3, 0.6], [-1, 0.6]]
    assert (wanted == -1).all()


def test_perturbations_are_executed_and_the_expert_is_shown():
    """On the line the expert always moves by 0.25, and never back."""
    with build("manipulation", LINE, 0).make_simulator(20) as sim:
        starts = [("go", seed) for seed in range(20)]
        astray = Disturbance(probability=0.5, length=2)
        made = record_expert(sim, starts, disturbance=astray, successful_only=False, seed=0)
    steps = np.concatenate([np.diff(episode.state[:, 0]) for episode in made])
    assert (steps < 0).any() and all((episode.actions == 0.25).all() for episode in made)


def test_demonstrations_are_disturbed_as_their_settings_say(monkeypatch):
    found = []
    monkeypatch.setattr(episodes, "record_expert", lambda *a, **kw: found.append(kw["disturbance"]) or ["one"])
    monkeypatch.setattr(episodes, "EpisodeDemonstrations", list)
    shown = {"noise": 0.1, "perturbation": 0.2, "perturbation_length": 7}
    assert build("manipulation", {**LINE, "demonstrations": shown}, 0).demonstrations == ["one"]
    assert found == [Disturbance(noise=0.1, probability=0.2, length=7)]


def test_failed_episodes_are_left_out():
    """Noise that mostly pushes back: some episodes run out of time."""
    with build("manipulation", LINE, 0).make_simulator(50) as sim:
        starts = [("go", seed) for seed in range(50)]
        every = record_expert(sim, starts, disturbance=Disturbance(0.3), successful_only=False, seed=1)
        good = record_expert(sim, starts, disturbance=Disturbance(0.3), successful_only=True, seed=1)
    assert 0 < len(good) < len(every) == 50


def test_shuffled_instructions_are_another_episodes():
    own = build("manipulation", {**LINE}, 0).make_simulator(4)
    other = build("manipulation", {**LINE, "instructions": "shuffled"}, 0).make_simulator(4)
    mine = own.reset([1, 2, 2, 3], ["go"] * 4).instructions
    theirs = other.reset([1, 2, 2, 3], ["go"] * 4).instructions
    assert all(a != b for a, b in zip(mine, theirs, strict=True)) and set(theirs) <= set(mine)
    same = other.reset([5, 5], ["go"] * 2).instructions[:2]  # the other rows are idle
    assert same == ["go from 0.05"] * 2
    other.reset([1, 2, 95, 3], ["go"] * 4)
    other.step(np.full((4, 1, 1), 0.25))  # the third has come to its end, and restarts alone
    assert other.running.tolist() == [True, True, False, True]
    assert other.restart([2], [7], ["go"]).instructions[2] == "go from 0.28"  # where the next row is now


def test_what_an_episode_earns():
    rewards = [{"name": f"mmrl.tasks.manipulation.rewards:{n}"} for n in ("success", "success_at_end", "simulator")]
    task = build("manipulation", {**LINE, "rewards": rewards}, 0)
    samples = [
        Sample(Prompt("a", "go"), episode=EPISODE),
        Sample(Prompt("b", "go"), episode=replace(EPISODE, lost=True)),
    ]
    scored = task.score(samples)
    assert scored[0].tolist() == [1.0, 0.0, 1.5] and scored[1].isnan().all()
    assert task.accuracy(samples).isnan().tolist() == [False, True]
    measured = task.measures(samples)
    assert measured["episode/lost"].tolist() == [0, 1]
    for name, value in (("episode/length", 3), ("episode/success_at_end", 0)):
        assert measured[name][0] == value and measured[name][1].isnan()  # an average leaves out what was lost
    assert "episode/reasoning" not in measured
    with pytest.raises(UserError, match="'c' is not an episode"):
        task.score([Sample(Prompt("c", "go"))])


def test_what_latents_before_a_chunk_cost():
    """Half a point for each, of which an episode drew 2.5 on average; one that was lost at once drew none."""
    earned = [{"name": "mmrl.tasks.manipulation.rewards:success"}]
    cost = [{"name": "mmrl.tasks.manipulation.rewards:reasoning", "label": "effort", "weight": -0.5}]
    task = build("manipulation", {**LINE, "rewards": earned + cost}, 0)
    samples = [
        Sample(Prompt("a", "go"), episode=replace(EPISODE, reasoning=2.5)),
        Sample(Prompt("b", "go"), episode=replace(EPISODE, lost=True, reasoning=math.nan)),
    ]
    scored = task.score(samples)
    assert scored[0].tolist() == [1.0, 2.5] and scored[1].isnan().all()
    total = combined_reward(scored, torch.tensor(task.reward_weights))
    assert total[0] == -0.25 and total[1].isnan()
    reasoning = task.measures(samples)["episode/reasoning"]
    assert reasoning[0] == 2.5 and reasoning[1].isnan()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 2, "turns": 3}, "turns=3 needs at least as many workers, but workers=2"),
        ({"python": "python3"}, "python=python3 is for workers, but workers=0; set workers to 1 or more"),
        ({"taks": ["go"]}, r"unknown key task\.taks; did you mean task\.tasks"),
        (
            {"demonstrations": {"episode": 3}},
            r"unknown key task\.demonstrations\.episode; did you mean .*\.episodes",
        ),
        ({"tasks": []}, "tasks: "),
        ({"rewards": [{"name": "sucess"}]}, "unknown reward 'sucess'"),
        ({"demonstrations": {"episodes": 1}, "tasks": ["fly"]}, "has no task 'fly'"),
        ({"demonstrations": {"episodes": 1}, "options": {"poisn": 1}}, "no option 'poisn'.*poison"),
    ],
)
def test_faulty_options_are_named(options, message):
    with pytest.raises((ValueError, UserError), match=message):
        assert build("manipulation", {**LINE, **options}, 0).demonstrations


def test_demonstrations_come_with_the_task():
    task = build("manipulation", {**LINE, "demonstrations": {"episodes": 3}, "rows": 2}, 0)
    assert isinstance(task.demonstrations, EpisodeDemonstrations) and len(task.demonstrations.episodes) == 3
    assert isinstance(task.evaluation, EpisodeSource)
    assert torch.tensor(task.demonstrations[0].metadata["observation"].state).shape == (1, 1)


def test_workers_play_under_an_interpreter_of_their_own(tmp_path):
    """A script that notes its arguments and goes on as this interpreter."""
    noted, own = tmp_path / "noted", tmp_path / "python"
    own.write_text(f'#!/bin/sh\necho "$@" >> {noted}\nexec {sys.executable} "$@"\n')
    own.chmod(0o755)
    task = build("manipulation", {**LINE, "workers": 1, "python": str(own)}, 0)
    with task.make_simulator(2) as sim:
        sim.reset([3, 4], ["go", "go"])
        assert sim.running.all() and "-m mmrl" in noted.read_text()
    with pytest.raises(UserError, match="there is no Python interpreter at /nowhere/python"):
        build("manipulation", {**LINE, "workers": 1, "python": "/nowhere/python"}, 0).make_simulator(1)
