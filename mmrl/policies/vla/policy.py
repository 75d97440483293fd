"""Vision-language-action models as policies: they play episodes from start states and score them."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn

from mmrl.engine.flops import CallMeter, PolicyWork, Tally
from mmrl.errors import UserError
from mmrl.policies.models import NetworkCall, TrainingEngine
from mmrl.policies.parts import by_parts
from mmrl.policies.vla.action_ranges import probe_demonstrated
from mmrl.policies.vla.backbones.backbone import Backbone
from mmrl.policies.vla.critic import Critic
from mmrl.policies.vla.episodes import (
    EpisodeRecord,
    Episodes,
    PolicyStep,
    stacked_choices,
    start_of,
    step_record,
    step_units,
    steps_of,
    trajectory_of,
)
from mmrl.policies.vla.heads.codec import Units
from mmrl.policies.vla.heads.head import EXTRA, ActionSampling, Chosen, Head, Reading
from mmrl.policies.vla.settings import Actions
from mmrl.policies.vla.states import StateStatistics
from mmrl.protocols.trajectory import RobotObservation, Trajectory
from mmrl.report.settings import Log
from mmrl.rollouts import (
    MATCHING,
    POLICY_STEPS,
    MatchingTargets,
    Prompt,
    Replay,
    Rollouts,
    Sample,
    Steps,
)
from mmrl.runtime.files import share
from mmrl.samplers.chain import derive_seed
from mmrl.schedules.schedule import Schedule
from mmrl.settings import plain
from mmrl.sims import Observation, Step, VectorSim, play

DESCRIPTION, WEIGHTS = "vla.json", "vla.safetensors"
log = logging.getLogger(__name__)
Numbers = TypeVar("Numbers", Tensor, NDArray[np.float32])  # of states


@dataclass(frozen=True)
class PolicyStepBatch:
    """A batch of policy steps for the network. inputs: of the backbone; old, reference: predictions of the old and the
    reference policy, where there are any."""

    inputs: dict[str, Tensor]
    state: Tensor  # [step, state]
    chosen: Chosen
    valid: Tensor  # [step, chunk] bool
    old: Tensor | None
    reference: Tensor | None


class Network(nn.Module):
    """Backbone, action head and critic: the module that the engine wraps."""

    def __init__(self, backbone: Backbone, head: Head, critic: Critic | None, privileged: int = 0) -> None:
        """privileged: how many of the last numbers of a state only the critic may read."""
        super().__init__()
        self.backbone, self.head, self.critic, self.privileged = backbone, head, critic, privileged

    def policy_state(self, state: Numbers) -> Numbers:
        """Returns the part of states [n, state] that the policy itself may read."""
        return state[:, : state.shape[1] - self.privileged]

    def forward(self, parts: Sequence[PolicyStepBatch]) -> dict[str, Tensor]:
        """Returns the fields of `Head.score` of all policy steps, and "value" [step] where there is a critic, computed
        a part at a time."""
        scored = by_parts(self.score, parts)
        return {name: torch.cat([one[name] for one in scored]) for name in scored[0]}

    def score(self, batch: PolicyStepBatch) -> dict[str, Tensor]:
        reading = self.read(batch.inputs)
        scored = self.head.score(
            reading, self.policy_state(batch.state), batch.chosen, batch.valid, batch.old, batch.reference
        )
        return scored if self.critic is None else {**scored, "value": self.critic(reading, batch.state)}

    def read(self, inputs: dict[str, Tensor]) -> Reading:
        if "hidden" in inputs:
            return self.backbone.cached_reading(inputs)
        return self.backbone.read(inputs, every_layer=self.head.every_layer)


@dataclass(frozen=True)
class PlayOptions:
    """Options of playing episodes. training: policy steps are recorded, to be scored. film: the images of the first
    `film` episodes are kept, in evaluation one after every action, in training one after every chunk. step: finished
    training steps. labelled: whether the simulator's expert says at every policy step what it would do there."""

    temperature: float
    training: bool
    film: int = 0
    step: int = 0
    labelled: bool = False


class VisionLanguageActionPolicy:
    """Plays episodes in a simulator and scores their actions.

    A prompt is a start state: metadata["seed"] and metadata["task"]. The rollouts of a group have equal seeds, so their
    first observations are equal; what differs is each rollout's own noise. Every policy step decides on a
    chunk of actions; steps after the end of an episode are masked.
    """

    def __init__(
        self,
        network: Network,
        action: Actions,
        sim: VectorSim,
        *,
        temperature: Schedule,
        evaluation_temperature: float = 0.0,
        statistics: Units | None = None,
        states: StateStatistics | None = None,
        steps_at_once: int | None = None,
        log: Log | None = None,
        watched: bool = False,
        stores_episodes: bool = False,
    ) -> None:
        """temperature: of rollouts, at the time that they are played; some heads have none. steps_at_once: see
        `replay`.
        log: which steps have tables, whose episodes are filmed where `action.film` is set. watched: whether all
        episodes are filmed, because the task needs the images. stores_episodes: whether rollouts keep what
        `trajectories` returns."""
        self.module, self.action, self.sim = network, action, sim
        self.watched, self.stores_episodes = watched, stores_episodes
        self.steps_at_once, self.log = steps_at_once, log or Log(samples_every=0)
        self.statistics, self.states, self._warned_of_ranges = statistics, states, False
        self.temperature, self.evaluation_temperature = temperature, evaluation_temperature
        labels = action.labels
        self.advantage_labels = ("", "") if labels is None else (labels.good, labels.bad)
        self._counted = Counter(sim.counters)
        self.module.eval()  # dropout would make replay differ from sampling
        tally = Tally()
        CallMeter(network, tally)
        self.playing, self.work = CallMeter(None, tally), PolicyWork([tally], step_units)
        self.caches_readings = network.backbone.frozen and network.head.context_only

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def max_decisions(self) -> int:
        return -(-self.action.horizon // self.action.chunk) * self.module.head.decisions

    # --- start states to episodes ---

    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], *, step: int = 0) -> Rollouts:
        """Plays `group_size` episodes a prompt. seeds: one a rollout, prompt by prompt. What a group shares, such as
        the window of its chains, comes from its first seed and training step `step`."""
        starts = [p for p in prompts for _ in range(group_size)]
        groups = [seed for seed in seeds[::group_size] for _ in range(group_size)]
        film = len(starts) if self.watched else filmed(self.action, self.log, step, group_size)
        options = PlayOptions(self.temperature.value, training=True, film=film, step=step)
        records = self._play(starts, seeds, groups, options)
        rollouts = self._rollouts([r.sample for r in records], [r.policy_steps for r in records])
        rollouts.mask &= ~torch.tensor([r.lost for r in records])[:, None]
        rollouts.group = torch.arange(len(prompts)).repeat_interleave(group_size)
        if self.module.critic is not None:
            rollouts.extras["steps"] = steps_of(records)
        return rollouts

    def respond(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        """Plays one episode a prompt at the temperature of evaluation."""
        film = len(prompts) if self.action.film or self.watched else 0
        options = PlayOptions(self.evaluation_temperature, training=False, film=film)
        return [record.sample for record in self._play(prompts, seeds, seeds, options)]

    @torch.no_grad()
    def act(self, observation: Observation, seeds: Sequence[int], temperature: float) -> NDArray[np.float64]:
        """Returns the chunks for observations from outside the simulator, [row, chunk, action] in the robot's units.
        seeds: of the noise, one a row."""
        state = self._state(observation).to(self.device)
        reading = self.module.read(self._collate(self._prepare(observation)))
        sampling = ActionSampling(list(seeds), temperature, training=False)
        actions = self.module.head.act(reading, self.module.policy_state(state), sampling)["actions"]
        return robot_units(actions, self.statistics)

    def view(self, rollouts: Rollouts, change: Callable[[Prompt], Prompt]) -> Rollouts:
        """Raises UserError: observations of an episode come from the simulator, not from its prompt."""
        raise UserError(
            "views of prompts are not for model.type=vision_language_action; remove the options that need them"
        )

    def demonstrate(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> Rollouts:
        """Returns single policy steps with the chunk that an expert executed, from metadata: "observation", an
        `Observation` of one row, and "actions" [up to chunk, action] in the robot's units. Raises UserError for prompts
        without actions, and for actions out of range."""
        missing = next((p.id for p in prompts if "actions" not in p.metadata), None)
        if missing is not None:
            raise UserError(
                f"prompt {missing} has no demonstrated actions: algorithm.type=supervised needs task.demonstrations"
            )
        batch = stacked([p.metadata["observation"] for p in prompts])
        actions, valid = self._padded([p.metadata["actions"] for p in prompts])
        if self.statistics is not None:
            self._warned_of_ranges |= warned_of_ranges(self.statistics, actions[valid.numpy()], self._warned_of_ranges)
            actions = self.statistics.from_robot(actions).astype(np.float32)
        elif (largest := np.abs(actions).max(axis=(1, 2))).max() > 1.01:
            raise UserError(
                f"the actions of prompt {prompts[int(largest.argmax())].id} reach {largest.max():.4g}: without "
                "action.statistics they must lie in [-1, 1]"
            )
        chosen = self.module.head.teach(torch.from_numpy(actions), seeds)
        labels = [prompt.metadata.get("label", "") for prompt in prompts]
        inputs, state = self._prepare(batch, labels), self._state(batch)
        policy_steps = [
            [PolicyStep(inputs[i], state[i], {k: v[i] for k, v in chosen.items()}, valid[i])]
            for i in range(len(prompts))
        ]
        rollouts = self._rollouts([Sample(prompt) for prompt in prompts], policy_steps)
        if self.module.critic is not None:  # which learns nothing from them
            blank = torch.zeros(len(prompts), 1)
            rollouts.extras["steps"] = Steps(blank.bool(), blank, blank.clone(), blank.bool(), blank.clone())
        return rollouts

    def labelled(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Prompt]:
        """Plays an episode a prompt as a rollout. Returns its observations as prompts for `demonstrate`, with the
        actions of the simulator's expert, who starts from there. Raises UserError where there is no expert."""
        options = PlayOptions(self.temperature.value, training=False, labelled=True)
        return [label for record in self._play(prompts, seeds, seeds, options) for label in record.labels]

    def trained_by(self, engine: TrainingEngine) -> None:
        """Does nothing: no part of the policy follows the engine's steps."""

    def counts(self) -> dict[str, float]:
        """Returns counts of the simulator since the last call: action numbers that were not finite, dropped episodes,
        restarted workers."""
        new = {name: total - self._counted[name] for name, total in self.sim.counters.items()}
        self._counted = Counter(self.sim.counters)
        return {f"simulator/{name.removesuffix('_episodes')}": float(count) for name, count in new.items()}

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Saves the backbone in its library's own format, head and critic as `vla.safetensors`, and the settings as
        `vla.json`."""
        save(folder, self.module, self.action, state, self.states)

    # --- episodes to likelihoods ---

    def replay(self, rollouts: Rollouts, model: NetworkCall, *, reference: bool = False) -> Replay:
        """Scores every decision with `model` (`self.module` or the engine around it); masked decisions hold 0.

        Runs the policy steps of all episodes in one batch, or `steps_at_once` of them at a time, which a backward pass
        then computes again. Where the simulator lost all episodes before their first step, a black image is scored in
        their place, so that fields and shapes are those of other batches."""
        if not any(rollouts.inputs):
            episodes = Episodes([[self._blank_step()], *([] for _ in rollouts.inputs[1:])], self.device)
        elif isinstance(rollouts.inputs, Episodes):
            episodes = rollouts.inputs
        else:
            episodes = rollouts.inputs = Episodes(rollouts.inputs, self.device)
        decisions = self.module.head.decisions
        shape = (len(episodes), rollouts.mask.shape[1] // decisions)
        # Whether no policy step is missing, as where each is a rollout of its own.
        dense = len(episodes.flat) == len(rollouts) * shape[1]

        def spread(values: Tensor) -> Tensor:
            if dense:
                return values.unflatten(0, shape)
            blank = values.new_zeros(*shape, *values.shape[1:])
            return blank.index_put((episodes.row, episodes.step), values)[: len(rollouts)]

        def at_policy_steps(values: Tensor | None) -> Tensor | None:
            if values is None:
                return None
            by_policy_step = rearrange(values.to(self.device), "b (s d) ... -> b s d ...", d=decisions)
            return by_policy_step.flatten(0, 1) if dense else by_policy_step[episodes.row, episodes.step]

        # The reference needs no old prediction; the old policy's may exist for some of the rollouts only.
        old = None if reference else at_policy_steps(rollouts.old_prediction)
        before = at_policy_steps(rollouts.ref_prediction)
        size = self.steps_at_once or len(episodes.flat)
        parts = []
        for first in range(0, len(episodes.flat), size):
            rows = slice(first, first + size)
            chosen = {name: values[rows] for name, values in episodes.chosen.items()}
            others = [None if values is None else values[rows] for values in (old, before)]
            inputs = self._collate([policy_step.observation for policy_step in episodes.flat[rows]])
            parts.append(PolicyStepBatch(inputs, episodes.state[rows], chosen, episodes.valid[rows], *others))
        scored = dict(model(parts))
        value = scored.pop("value", None)
        fields: dict[str, Any] = {n: rearrange(spread(v), "b s d ... -> b (s d) ...") for n, v in scored.items()}
        if "noisy" in fields:
            fields[MATCHING.name] = matching_of(fields)
        if "std" in fields:
            fields["std"] = fields["std"].where(fields["std"] > 0, 1)  # of policy steps that do not exist
        numbers = torch.arange(shape[1], device=self.device).repeat_interleave(decisions).expand(len(rollouts), -1)
        columns = {name.removeprefix(EXTRA): field for name, field in fields.items()}
        return Replay.of({**columns, POLICY_STEPS.name: numbers, "value": None if value is None else spread(value)})

    def trajectories(self, rollouts: Rollouts) -> list[Trajectory | None]:
        """Returns the episode of each rollout; None where the simulator lost it, and for rollouts that are none."""
        return [
            None
            if sample.episode is None or sample.episode.lost
            else trajectory_of(steps, success=sample.episode.success)
            for sample, steps in zip(rollouts.samples, rollouts.inputs, strict=True)
        ]

    def actions(self, rollouts: Rollouts) -> Tensor:
        """Returns the head's present actions at every policy step at temperature 0, [step, chunk, action], with
        gradient."""
        policy_steps = [policy_step for episode in rollouts.inputs for policy_step in episode]
        state = torch.stack([policy_step.state for policy_step in policy_steps]).to(self.device)
        reading = self.module.read(self._collate([policy_step.observation for policy_step in policy_steps]))
        sampling = ActionSampling([0] * len(policy_steps), temperature=0.0, training=False)
        return self.module.head.act(reading, self.module.policy_state(state), sampling)["actions"]

    def lengths(self, rollouts: Rollouts) -> Tensor:
        """Returns the number of policy steps of each rollout, [rollout] int64."""
        return torch.tensor([len(episode) for episode in rollouts.inputs])

    def by_step(self, rollouts: Rollouts) -> Rollouts:
        """Returns every policy step as a rollout of its own, episode by episode."""
        return rollouts.by_step([[[policy_step] for policy_step in episode] for episode in rollouts.inputs])

    @property
    def encoding_sizes(self) -> tuple[int, int]:
        simulator = self.sim.simulator
        return self.module.backbone.width + simulator.state_dim, self.action.chunk * (simulator.action_dim + 1)

    @property
    def chunk_length(self) -> int:
        return self.action.chunk

    @torch.no_grad()
    def encode_observations(self, observations: Sequence[RobotObservation]) -> Tensor:
        """Returns the backbone's features of the prompt's last token, and the robot's state."""
        batch = stacked(observations)
        reading = self.module.read(self._collate(self._prepare(batch)))
        return torch.cat([reading.last.float().cpu(), self._state(batch).float()], 1)

    def encode_chunks(self, chunks: Sequence[NDArray[np.float32]]) -> Tensor:
        actions, valid = self._padded(chunks)
        if self.statistics is not None:
            actions = self.statistics.from_robot(actions).astype(np.float32)
        executed = torch.from_numpy(actions).where(valid[..., None], 0)
        return torch.cat([executed.flatten(1), valid.float()], 1)

    # --- details ---

    def _padded(self, chunks: Sequence[NDArray[np.float32]]) -> tuple[NDArray[np.float32], Tensor]:
        """Returns chunks [executed, action], cut to the policy's length, as [n, chunk, action] with zeros behind them,
        and which of their actions were executed, [n, chunk] bool."""
        actions = np.zeros((len(chunks), self.action.chunk, self.sim.simulator.action_dim), np.float32)
        valid = torch.zeros(actions.shape[:2], dtype=torch.bool)
        for i, chunk in enumerate(chunks):
            executed = chunk[: self.action.chunk]
            actions[i, : len(executed)], valid[i, : len(executed)] = executed, True
        return actions, valid

    @torch.no_grad()
    def _play(
        self, starts: Sequence[Prompt], seeds: Sequence[int], groups: Sequence[int], options: PlayOptions
    ) -> list[EpisodeRecord]:
        """Plays an episode from each start. A row of the simulator whose episode ends gets the next start; the network
        runs for running episodes only."""
        sim, head, critic = self.sim, self.module.head, self.module.critic
        records = [EpisodeRecord(prompt, reasons=head.reasons) for prompt in starts]
        playing = list(range(min(len(sim), len(starts))))  # by row, which of the episodes
        waiting = iter(range(len(playing), len(starts)))
        sim.reset(*zip(*(start_of(starts[i]) for i in playing), strict=True))
        step_counts = Counter[int]()

        def following(row: int) -> tuple[int, str] | None:
            if (number := next(waiting, None)) is None:
                return None
            playing[row] = number
            return start_of(starts[number])

        def act(observation: Observation, rows: NDArray[np.int64]) -> tuple[list[NDArray], Any]:
            numbers = [playing[row] for row in rows]
            for number, row in zip(numbers, rows, strict=True):
                if not step_counts[number]:
                    records[number].begin(observation, row, number < options.film)
            shown = observation.select(rows)
            prepared, state = self._prepare(shown), self._state(shown).to(self.device)
            step_seeds = [
                derive_seed(seeds[number], step_counts[number])  # each policy step of an episode has noise of its own
                for number in numbers
            ]
            step_counts.update(numbers)
            if options.labelled:
                expert = sim.expert(np.isin(np.arange(len(sim)), rows), length=self.action.chunk)
                for i, (number, row) in enumerate(zip(numbers, rows, strict=True)):
                    records[number].add_label(shown.select(np.array([i])), expert[row])
            group_seeds = [groups[number] for number in numbers]
            sampling = ActionSampling(step_seeds, options.temperature, options.training, group_seeds, options.step)
            inputs = self._collate(prepared)
            with self.playing.call(state, inputs):
                reading = self.module.read(inputs)
                chosen = head.act(reading, self.module.policy_state(state), sampling)
            values = [0.0] * len(rows) if critic is None else critic(reading, state).tolist()
            actions = np.zeros((len(sim), *chosen["actions"].shape[1:]))  # 0 for other environments
            actions[rows] = robot_units(chosen["actions"], self.statistics)
            by_action = options.film and not options.training  # one action at a time, with an image after each
            parts = np.split(actions, actions.shape[1], axis=1) if by_action else [actions]
            columns = {name: value.cpu() for name, value in chosen.items()}
            return parts, (prepared, state.cpu(), columns, values, shown, actions[rows].astype(np.float32))

        def tell(rows: NDArray[np.int64], steps: list[Step], context: Any) -> None:
            played = [records[playing[row]] for row in rows]
            for step in steps:
                for record, row in zip(played, rows, strict=True):
                    record.add_step(step, row, playing[row] < options.film)
            prepared, state, chosen, values, shown, actions = context
            if head.reasons:
                for record, count in zip(played, head.reasoning_steps(chosen).tolist(), strict=True):
                    record.reasoning.append(count)
            if options.training:
                valid = torch.from_numpy(steps[-1].valid[rows])
                picked = zip(*(column.unbind() for column in chosen.values()), strict=True)
                columns = zip(rows, prepared, state.unbind(), picked, valid.unbind(), values, strict=True)
                for i, (row, prepared_row, numbers, choice, executed, value) in enumerate(columns):
                    stored = step_record(shown, actions, i, steps[-1], row) if self.stores_episodes else None
                    by_name = dict(zip(chosen, choice, strict=True))
                    policy_step = PolicyStep(prepared_row, numbers, by_name, executed, stored)
                    played[i].policy_steps.append(policy_step)
                    played[i].values.append(value)
                self._value_ends(steps[-1], {row: record for row, record in zip(rows, played, strict=True)})

        play(sim, act, tell, max_chunks=self.action.horizon, following=following)
        return records

    def _value_ends(self, step: Step, records: dict[int, EpisodeRecord]) -> None:
        """Sets the critic's value of the final observations of episodes that ended or were truncated in this step.
        records: by row."""
        ended = [row for row in records if step.ended[row] and not step.dropped[row]]
        if self.module.critic is None or not ended:
            return
        shown = step.observation.select(ended)
        reading = self.module.read(self._collate(self._prepare(shown))) if self.module.critic.reads else None
        values = self.module.critic(reading, self._state(shown).to(self.device))
        for row, value in zip(ended, values.tolist(), strict=True):
            records[row].bootstrap = value

    @torch.no_grad()
    def _blank_step(self) -> PolicyStep:
        """Returns a policy step with a black image and no executed action."""
        shown = blank_observation(self.sim, 1)
        prepared, numbers = self._prepare(shown), self._state(shown).to(self.device)
        sampling = ActionSampling([0], self.temperature.value, groups=[0])
        chosen = self.module.head.act(
            self.module.read(self._collate(prepared)), self.module.policy_state(numbers), sampling
        )
        executed = torch.zeros(self.action.chunk, dtype=torch.bool)
        return PolicyStep(
            prepared[0], numbers[0].cpu(), {name: value[0].cpu() for name, value in chosen.items()}, executed
        )

    def _state(self, observation: Observation) -> Tensor:
        """Returns states [row, state], standardised where the policy has statistics."""
        state = observation.state
        return torch.from_numpy(state if self.states is None else self.states.standardised(state))

    def _prepare(self, observation: Observation, labels: Sequence[str] | None = None) -> list[Any]:
        """Returns for each row what its policy step keeps: the prepared prompt, or the reading of a frozen backbone.
        labels: behind the instructions; None: of a good action, where prompts have labels."""
        backbone, template = self.module.backbone, self.action.prompt
        if labels is None:
            labels = [self.advantage_labels[0]] * len(observation)
        labelled = [f"{i} {label}".rstrip() for i, label in zip(observation.instructions, labels, strict=True)]
        texts = [backbone.ask(i) if template is None else template.format(instruction=i) for i in labelled]
        named = self.action.cameras
        images = [observation.images] if named is None else [observation.image(camera) for camera in named]
        prepared = backbone.prepare(images, texts, self.module.policy_state(observation.state))
        if not self.caches_readings:
            return prepared
        with torch.no_grad():
            return backbone.cache_rows(backbone.read(backbone.collate(prepared, self.device), every_layer=False))

    def _collate(self, prepared: list[Any]) -> dict[str, Tensor]:
        backbone = self.module.backbone
        collate = backbone.collate_cached if self.caches_readings else backbone.collate
        return collate(prepared, self.device)

    def _rollouts(self, samples: list[Sample], policy_steps: list[list[PolicyStep]]) -> Rollouts:
        """Returns rollouts whose mask [episode, step x decision] is true where actions were executed."""
        head = self.module.head
        longest = max(1, *map(len, policy_steps))
        mask = torch.zeros(len(policy_steps), longest, head.decisions, dtype=torch.bool)
        for b, episode in enumerate(policy_steps):
            if not episode:  # lost at once: its mask stays False
                continue
            counted = head.decided(
                torch.stack([policy_step.valid for policy_step in episode]), stacked_choices(episode)
            )
            mask[b, : len(episode)] = counted
        return Rollouts(
            samples=samples, inputs=policy_steps, group=torch.arange(len(policy_steps)), mask=mask.flatten(1)
        )


def warned_of_ranges(statistics: Units, actions: NDArray[np.float32], before: bool) -> bool:
    """Warns of demonstrated actions [action, number] that statistics do not span, unless that was done before. Returns
    whether it did."""
    remarks = [] if before else list(probe_demonstrated(statistics, actions.astype(np.float64)))
    for remark in remarks:
        log.warning(remark)
    return bool(remarks)


def robot_units(actions: Tensor, statistics: Units | None) -> NDArray[np.float64]:
    """Converts actions [..., action], in the units of `statistics` or in [-1, 1], to the robot's units."""
    numbers = actions.float().cpu().numpy().astype(np.float64)
    numbers[~np.isfinite(numbers)] = np.nan  # the simulator counts them; a clamp would make infinity an action
    return numbers.clip(-1, 1) if statistics is None else statistics.to_robot(numbers)


def stacked(observations: Sequence[RobotObservation]) -> Observation:
    """Returns observations of one row each as one of as many rows."""
    return Observation(
        np.concatenate([observation.images for observation in observations]),
        np.concatenate([observation.state for observation in observations]),
        [observation.instructions[0] for observation in observations],
        observations[0].cameras,
    )


def blank_observation(sim: VectorSim, rows: int) -> Observation:
    """Returns black images and states of 0."""
    simulator = sim.simulator
    images = np.zeros((rows, *simulator.image_shape), np.uint8)
    state = np.zeros((rows, simulator.state_dim), np.float32)
    return Observation(images, state, ["nothing"] * rows, sim.cameras)


def tells_apart(policy: VisionLanguageActionPolicy, label: str, other: str) -> bool:
    """Returns whether the model's inputs differ with two labels behind an instruction."""
    inputs = policy._collate(policy._prepare(blank_observation(policy.sim, 2), [label, other]))
    return any(not torch.equal(values[0], values[1]) for values in inputs.values())


def filmed(action: Actions, log: Log, step: int, group_size: int) -> int:
    """Returns the number of rollouts to film in step `step`, for the table that is due when it has finished; 0: no
    table."""
    if not action.film or not log.samples_every or (step + 1) % log.samples_every:
        return 0
    return -(-log.samples // group_size) * group_size


def matching_of(fields: dict[str, Tensor]) -> MatchingTargets:
    """Moves the fields of noisy chunks from `FlowHead` out of `fields` into matching targets; policy steps that do not
    exist have errors of 0."""
    sigma = fields.pop("sigma")
    noisy, v, old, data = (fields.pop(name) for name in ("noisy", "velocity", "old_velocity", "data"))
    return MatchingTargets(
        noisy=noisy, prediction=v, old=old, data=data, sigma=sigma, signal=1 - sigma, noise_space=False
    )


def save(
    folder: Path, network: Network, action: Actions, state: dict[str, Tensor], states: StateStatistics | None
) -> None:
    """Saves a network as `VisionLanguageActionPolicy.save`. state: state dict of `network`."""
    weights = {name: value.contiguous() for name, value in state.items() if not name.startswith("backbone.")}
    network.backbone.save(folder, below("backbone.", state))
    rest = network.head.save(folder, below("head.", weights))
    critic_weights = {name: value for name, value in weights.items() if not name.startswith("head.")}
    save_file({**critic_weights, **{f"head.{name}": value for name, value in rest.items()}}, folder / WEIGHTS)
    description = plain(action) | ({} if states is None else {"states": states.to_json()})
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=2))
    share(folder)


def below(part: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(part): value for name, value in state.items() if name.startswith(part)}
