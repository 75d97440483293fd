"""Five ways to improve a weak robot policy on the tabletop: held-out success by the number of environment steps.

    .venv/bin/python scripts/bench/robot_methods.py [--task push] [--seeds 3] [--first 0] [--runs runs/robot_methods]
        [--only ARM] [--table]

Each seed has a weak base of its own: a Gaussian head that learned from 60 or 150 episodes of the scripted expert, and
for `steered` a flow head that learned from the same episodes. The policies read the state, with the positions of the
cube and its goal; their images are of 16 x 16 pixels.

ppo       PPO with the simulator's shaped reward
steered   the same PPO, on the noise of the frozen flow (head `steered`)
ogpo      the same PPO, and PPO on proposed chunks with Q networks as their reward (term `q_policy_gradient`)
rlpd      soft actor-critic from the base; half of its batches are the expert's episodes (with noise, failures too)
recap     advantage-conditioned imitation of all episodes so far, in two rounds: the policy plays, then it learns
control   as ppo, with random rewards

An environment step is one action of a training episode; steps of evaluations and of the expert do not count. Held-out
success is of 100 starts with the likeliest actions. Settings were selected with --task lift --first 9 --seeds 1. Runs
that exist already are not repeated. --table prints what exists and trains nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from mmrl.tasks.manipulation.settings import DemonstratedEpisodes, DemonstratingTask

ROOT = Path(__file__).parents[2]
STARTS = 100  # held-out starts of an evaluation
EPISODES, FEW_EPISODES, ROUND_EPISODES = 48, 16, 160  # of a training step: on-policy arms, rlpd, a round of recap
HEAD = "{type: gaussian, std: 0.3, layers: 2, last_gain: 0.1}"
FLOW = "{type: flow, width: 64, depth: 2, evaluation_steps: 5}"
BASES = {  # training steps, by the head of the base: few, so that RL has something to improve
    "lift": {"gaussian": 60, "flow": 90},
    "push": {"gaussian": 250, "flow": 300},
}
DEMONSTRATIONS = {  # of the bases, and their learning rate
    "lift": ["task.demonstrations={episodes: 60, noise: 0.1}", "optim.lr=1e-3"],
    "push": ["task.demonstrations={episodes: 150, noise: 0.05}", "optim.lr=2e-3"],
}
COMMON = [
    "threads=1",
    "task.options={control: position, privileged: true, objects: 2, image_size: 16, reward: shaped}",
    "action.chunk=2",
    "action.standardise=true",
    "checkpoint={every: 0, best: false}",
]
SUCCESS = "{name: 'mmrl.tasks.manipulation.rewards:success', label: success"
RETURNS = "returns: {gamma: 0.97, simulator_reward: 1.0}"
PPO = (
    "type: ppo, gamma: 0.98, lam: 0.9, simulator_reward: 1.0, critic: separate, value_coefficient: 0.5, "
    "minibatches: 2, surrogate: {low: 0.2, high: 0.28}"
)
ON_POLICY = [
    f"task.rewards=[{SUCCESS}, weight: 0}}]",
    f"rollout={{prompts: {EPISODES}, group_size: 1, temperature: 0.4}}",
    f"algorithm={{{PPO}}}",
    "optim={lr: 2e-4, warmup_steps: 2, hold_steps: 2, groups: {critic: {lr: 2e-3}}}",
    "steps=12",
    f"evaluation={{every: 4, prompts: {STARTS}, before: false}}",
]
Q = "q: {target: next_action, width: 128, updates: 100, batch: 128, lr: 1e-3, tau: 0.02}"
STEERED_HEAD = f"{{type: steered, width: 64, layers: 2, base: {FLOW}}}"
PROPOSALS = "extras: [{type: action_proposals, steps: 128, group_size: 4}]"
ARMS: dict[str, list[str]] = {
    "ppo": ON_POLICY,
    "steered": [
        *ON_POLICY,
        f"action.head={STEERED_HEAD}",
        "rollout.temperature=1.0",
        "optim.lr=3e-3",
    ],
    "ogpo": [
        *ON_POLICY,
        f"rollout={{prompts: {EPISODES}, group_size: 1, temperature: 0.4, {PROPOSALS}}}",
        f"algorithm={{{PPO}, terms: [{{type: q_policy_gradient, coefficient: 0.1, {RETURNS}, {Q}}}]}}",
    ],
    "rlpd": [
        f"task.rewards=[{SUCCESS}}}]",
        f"rollout={{prompts: {FEW_EPISODES}, temperature: 0.4, extras: [{{type: stored_steps, steps: 256}}, "
        "{type: demonstrations, prompts: 256}]}",
        f"algorithm={{type: soft_actor_critic, of: mean, minibatches: 4, {RETURNS}, q: {{members: 5, width: 128, "
        "updates: 100, batch: 128, lr: 1e-3, tau: 0.01, entropy: {temperature: 0.01, target: null}}}",
        "task.demonstrations={type: expert, episodes: 60, noise: 0.2, perturbation: 0.03, successful: false, "
        "actions: executed}",
        "optim={lr: 1e-4, warmup_steps: 32}",  # so that the policy moves little while Q is unknown
        "steps=24",
        f"evaluation={{every: 8, prompts: {STARTS}, before: false}}",
    ],
    "control": [
        *ON_POLICY,
        "task.rewards=[{name: random}]",
        "algorithm.simulator_reward=0.0",
    ],
}
ROUNDS = 2  # of RECAP
PLAYED = [  # a step that plays and stores episodes, and changes nothing
    f"task.rewards=[{SUCCESS}}}]",
    f"rollout={{prompts: {ROUND_EPISODES}, group_size: 1, temperature: 0.4, "
    "extras: [{type: stored_steps, steps: 64}]}",
    "algorithm={type: ppo, critic: shared}",
    "optim={lr: 1e-12}",
    "steps=1",
    "evaluation={every: 0, prompts: 1, before: false}",
]
CONDITIONED = [
    f"algorithm={{type: advantage_conditioned, {RETURNS}}}",
    "rollout={prompts: 64}",
    "optim={lr: 5e-4}",
    "steps=150",
    f"evaluation={{every: 0, prompts: {STARTS}, before: false}}",
]


class StoredEpisodes(DemonstratedEpisodes):
    """The policy steps that runs with rollout.extras=[stored_steps] have stored, as demonstrations."""

    type: str = "scripts.bench.robot_methods:StoredEpisodes"
    runs: list[str] = []

    def prompts(self, task: DemonstratingTask, starts: Any) -> Any:
        from mmrl.collection.stored_steps.ring import Segment
        from mmrl.collection.stored_steps.source import as_prompt

        files = [file for run in self.runs for file in sorted(Path(run).glob("stored_steps/rank_0/*.safetensors"))]
        segments = [Segment(file, "all") for file in files]
        return [as_prompt(step) for segment in segments for step in segment.read(range(len(segment)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=list(BASES), default="push")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--runs", type=Path, default=Path("runs/robot_methods"), help="folder of the runs")
    parser.add_argument("--only", choices=[*ARMS, "recap"], help="this arm alone")
    parser.add_argument("--table", action="store_true", help="print the runs that exist, and train nothing")
    options = parser.parse_args()
    arms = [options.only] if options.only else ["ppo", "steered", "ogpo", "rlpd", "recap", "control"]
    print("| arm | seed | success by environment steps | final | steps until PPO's final success | minutes |")
    print("| --- | --- | --- | --- | --- | --- |")
    for seed in range(options.first, options.first + options.seeds):
        goal = None
        for arm in arms:
            folder = options.runs / options.task / f"{arm}_{seed}"
            if not options.table:
                train(folder, options.task, arm, seed)
            points, minutes = curve(folder, arm)
            if arm == "ppo" and points:
                goal = points[-1][1]
            print("| " + " | ".join([arm, str(seed), *cells(points, goal), minutes]) + " |", flush=True)


def cells(points: list[tuple[int, float]], goal: float | None) -> list[str]:
    """Returns the cells of a curve, which is empty where the run is missing: the curve, the final success, and the
    environment steps after which success first was `goal`."""
    if not points:
        return ["missing", "", ""]
    reached = next((steps for steps, success in points if goal is not None and steps and success >= goal), None)
    by_steps = ", ".join(f"{steps:,}: {success:.2f}" for steps, success in points)
    return [by_steps, f"{points[-1][1]:.2f}", "not reached" if reached is None else f"{reached:,}"]


def curve(folder: Path, arm: str) -> tuple[list[tuple[int, float]], str]:
    """Returns environment steps and held-out success at every evaluation, and the minutes of wall-clock time that
    training took; no points where the run is not complete."""
    episodes = {"rlpd": FEW_EPISODES, "recap": ROUND_EPISODES}.get(arm, EPISODES)
    name, seed = folder.name.rsplit("_", 1)
    parts = [folder.with_name(f"{'flow' if name == 'steered' else 'gaussian'}_base_{seed}"), folder]
    if arm == "recap":
        parts[1:] = [folder / f"{part}_{i}" for i in range(ROUNDS) for part in ("played", "learned")]
    points: list[tuple[int, float]] = []
    steps, seconds = 0.0, 0.0
    for part in parts:
        if not (part / "final").is_dir():
            return [], ""
        for row in map(json.loads, (part / "metrics.jsonl").read_text().splitlines()):
            if "loss" in row and part != parts[0]:
                seconds += row["time/step"]
                steps += episodes * row.get("episode/length", 0.0)  # imitation plays none
            if "evaluation/accuracy" in row and row["evaluation/n"] == STARTS:
                points.append((round(steps), row["evaluation/accuracy"]))
    return points, f"{seconds / 60:.1f}"


def train(folder: Path, task: str, arm: str, seed: int) -> None:
    """Trains an arm from its base, and the base, unless that was done before."""
    base = train_base(folder.parent, task, "flow" if arm == "steered" else "gaussian", seed)
    if arm == "recap":
        train_in_rounds(folder, task, base, seed)
    else:
        start = [f"model.path={base}", f"action.head={HEAD}"]
        run(folder, "manipulation_tabletop_lift_ppo", task, seed, start, ARMS[arm])


def train_base(runs: Path, task: str, head: str, seed: int) -> Path:
    """Trains the base of a seed by imitation. Returns the folder of its weights."""
    folder = runs / f"{head}_base_{seed}"
    settings = [
        "model.build=mmrl.tasks.manipulation.tiny_model:build_labelled",
        f"action.head={HEAD if head == 'gaussian' else FLOW}",
        *DEMONSTRATIONS[task],
        f"steps={BASES[task][head]}",
        f"evaluation={{every: 0, prompts: {STARTS}, before: false}}",
    ]
    run(folder, "manipulation_tabletop_warm_start", task, seed, [], settings)
    return folder / "final"


def train_in_rounds(folder: Path, task: str, base: Path, seed: int) -> None:
    """Trains RECAP: in each round the policy plays, and the base learns from all episodes so far."""
    policy, stored = base, []
    for i in range(ROUNDS):
        labels = [] if policy == base else ["action.labels={}"]
        start = [f"model.path={policy}", f"action.head={HEAD}", *labels]
        # other start states in each round
        run(folder / f"played_{i}", "manipulation_tabletop_lift_ppo", task, seed + 1000 * i, start, PLAYED)
        stored.append(str(folder / f"played_{i}"))
        episodes = f"task.demonstrations={{type: '{StoredEpisodes.model_fields['type'].default}', runs: {stored}}}"
        start = [f"model.path={base}", "model.build=null", f"action.head={HEAD}", "action.labels={}", episodes]
        run(folder / f"learned_{i}", "manipulation_tabletop_warm_start", task, seed, start, CONDITIONED)
        policy = folder / f"learned_{i}" / "final"


def run(folder: Path, recipe: str, task: str, seed: int, start: list[str], settings: list[str]) -> None:
    """Trains a recipe of the tabletop with other settings, unless that was done before."""
    if (folder / "final").is_dir():
        return
    own = [f"run_dir={folder}", f"seed={seed}", f"task.tasks=[{task}]", *COMMON]
    if recipe == "manipulation_tabletop_lift_ppo":
        own += ["model.warm_start=null", "action.privileged=0", "optim.ema=null"]
    command = [sys.executable, "-m", "mmrl", "train", recipe, *own, *start, *settings]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=log, cwd=ROOT)


if __name__ == "__main__":
    main()
